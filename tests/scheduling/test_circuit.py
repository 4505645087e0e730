"""A circuit breaker: when it opens, for how long, and what closes it."""

from llmserve.request import Request
from llmserve.scheduling.circuit import SERVED_S, SUSPECTS_MAX, Circuit, Suspects


def opened(at_s: float = 0.0) -> Circuit:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    for request_id in (1, 2):
        circuit.started(request_id)
        circuit.fault(Request(request_id), at_s)
    return circuit


def test_faults_in_a_row_open_the_circuit_unless_a_success_interrupts_them() -> None:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    circuit.fault(Request(1), 0.0)
    circuit.success([Request(2)], 0.0)
    circuit.fault(Request(2), 0.0)
    assert circuit.closed
    circuit.fault(Request(3), 0.0)
    assert circuit.open_until_s == 1.0
    assert not circuit.takes(0.5)


def test_after_the_pause_one_request_is_on_trial() -> None:
    circuit = opened()
    assert circuit.takes(1.0)
    circuit.started(3)
    assert not circuit.takes(1.0)
    circuit.success([Request(3)], 0.0)
    assert circuit.closed
    assert circuit.takes(1.0)


def test_each_failed_trial_doubles_the_pause_up_to_a_limit_and_success_shortens_it_again() -> None:
    circuit, now_s, pauses_s = opened(), 1.0, []
    for request_id in range(10, 18):
        circuit.started(request_id)
        circuit.fault(Request(request_id), now_s)
        assert circuit.open_until_s is not None
        pauses_s.append(circuit.open_until_s - now_s)
        now_s = circuit.open_until_s
    assert pauses_s == [2, 4, 8, 16, 32, 32, 32, 32]
    circuit.started(19)
    circuit.success([Request(19)], 0.0)
    circuit.fault(Request(20), now_s)
    circuit.fault(Request(21), now_s)
    assert circuit.open_until_s == now_s + 1.0


def test_requests_sent_before_it_opened_do_not_change_the_pause() -> None:
    circuit = opened()
    circuit.fault(Request(99), 0.9)
    circuit.success([Request(98)], 0.0)
    assert circuit.open_until_s == 1.0


def test_a_trial_whose_client_leaves_makes_room_for_another() -> None:
    circuit = opened()
    circuit.started(3)
    circuit.end_trial(3)
    assert circuit.takes(1.0)


def test_without_a_limit_the_circuit_never_opens() -> None:
    circuit = Circuit(faults_max=0, pause_s=1.0)
    for request_id in range(1000):
        circuit.fault(Request(request_id), 0.0)
    assert circuit.closed


# ---- whose fault it was ----


def test_faults_of_one_sender_do_not_open_the_circuit_while_others_are_served() -> None:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    circuit.success([Request(1, sender=7)], 0.0)
    for request_id in range(2, 200):
        circuit.fault(Request(request_id, sender=8), 1.0)
    assert circuit.closed
    circuit.fault(Request(200, sender=7), 1.0)
    assert not circuit.closed, "now every sender has a fault"


def test_the_faults_of_an_only_sender_open_the_circuit() -> None:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    circuit.success([Request(1, sender=7)], 0.0)
    circuit.fault(Request(2, sender=7), 1.0)
    circuit.fault(Request(3, sender=7), 1.0)
    assert not circuit.closed


def test_a_sender_that_was_served_long_ago_does_not_speak_for_the_engine() -> None:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    circuit.success([Request(1, sender=7)], 0.0)
    circuit.fault(Request(2, sender=8), SERVED_S - 1)
    circuit.fault(Request(3, sender=8), SERVED_S - 1)
    assert circuit.closed
    circuit.fault(Request(4, sender=8), SERVED_S)
    assert not circuit.closed


def test_faults_that_are_taken_back_close_the_circuit() -> None:
    circuit = opened()
    circuit.take_back(1, 0.5)
    assert circuit.closed
    circuit.fault(Request(3), 0.6)
    assert not circuit.closed, "2 was not taken back"


def test_what_another_engine_answered_proves_the_fault_whoever_sent_it() -> None:
    circuit = Circuit(faults_max=2, pause_s=1.0)
    circuit.success([Request(1, sender=7)], 0.0)
    for request_id in (2, 3):
        circuit.fault(Request(request_id, sender=8), 1.0)
        circuit.prove(request_id, 1.0)
    assert circuit.open_until_s == 2.0


def test_a_suspects_failure_on_trial_does_not_lengthen_the_pause() -> None:
    circuit = opened()
    assert circuit.suspects_from_s == 2.0
    circuit.started(3)
    circuit.fault(Request(3), 2.0, suspect=True)
    assert circuit.open_until_s == 3.0


def test_a_suspect_is_cleared_by_an_answer_and_the_oldest_are_forgotten() -> None:
    suspects = Suspects()
    for sender in range(SUSPECTS_MAX + 2):
        suspects.add(sender)
    assert (0 in suspects, 1 in suspects, 2 in suspects, len(suspects)) == (False, False, True, SUSPECTS_MAX)
    suspects.clear(2)
    assert 2 not in suspects
