"""A circuit breaker: when it opens, for how long, and what closes it."""

from llmserve.scheduling.circuit import Circuit


def opened(at_s: float = 0.0) -> Circuit:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    for request_id in (1, 2):
        circuit.started(request_id)
        circuit.fault(request_id, at_s)
    return circuit


def test_faults_in_a_row_open_the_circuit_unless_a_success_interrupts_them() -> None:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    circuit.fault(1, 0.0)
    circuit.success([2])
    circuit.fault(2, 0.0)
    assert circuit.closed
    circuit.fault(3, 0.0)
    assert circuit.open_until_s == 1.0
    assert not circuit.takes(0.5)


def test_after_the_pause_one_request_is_on_trial() -> None:
    circuit = opened()
    assert circuit.takes(1.0)
    circuit.started(3)
    assert not circuit.takes(1.0)
    circuit.success([3])
    assert circuit.closed
    assert circuit.takes(1.0)


def test_each_failed_trial_doubles_the_pause_up_to_a_limit_and_success_shortens_it_again() -> None:
    circuit, now_s, pauses_s = opened(), 1.0, []
    for request_id in range(10, 18):
        circuit.started(request_id)
        circuit.fault(request_id, now_s)
        assert circuit.open_until_s is not None
        pauses_s.append(circuit.open_until_s - now_s)
        now_s = circuit.open_until_s
    assert pauses_s == [2, 4, 8, 16, 32, 32, 32, 32]
    circuit.started(19)
    circuit.success([19])
    circuit.fault(20, now_s)
    circuit.fault(21, now_s)
    assert circuit.open_until_s == now_s + 1.0


def test_requests_sent_before_it_opened_do_not_change_the_pause() -> None:
    circuit = opened()
    circuit.fault(99, 0.9)
    circuit.success([98])
    assert circuit.open_until_s == 1.0


def test_a_trial_whose_client_leaves_makes_room_for_another() -> None:
    circuit = opened()
    circuit.started(3)
    circuit.end_trial(3)
    assert circuit.takes(1.0)


def test_without_a_limit_the_circuit_never_opens() -> None:
    circuit = Circuit(faults_max=0, pause_s=1.0)
    for request_id in range(1000):
        circuit.fault(request_id, 0.0)
    assert circuit.closed
