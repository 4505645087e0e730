"""What a cluster must not forget is in files of the head's node."""

from __future__ import annotations

import stat
from pathlib import Path

from llmserve.machines.store import Store


def test_what_was_saved_is_there_for_the_next_process(tmp_path: Path) -> None:
    Store(tmp_path / "store").save("process/gateway-0", b"one")
    Store(tmp_path / "store").save("process/gateway-0", b"two")
    assert Store(tmp_path / "store").load("process/gateway-0") == b"two"
    assert Store(tmp_path / "store").load("process/gateway-1") is None


def test_a_value_and_all_values_can_be_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.save("a", None)
    for key in ("a", "b"):
        store.save(key, b"value")
    store.save("a", None)
    assert (store.load("a"), store.load("b")) == (None, b"value")
    store.clear()
    assert store.load("b") is None
    store.save("b", b"again")
    assert store.load("b") == b"again"


def test_only_the_owner_can_read_the_keys_of_the_cluster(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.save("desired", b"secrets")
    (file,) = (tmp_path / "store").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_value_that_was_not_written_to_its_end_is_the_one_before(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.save("a", b"before")
    (tmp_path / "store" / "a.new").write_bytes(b"aft")
    assert store.load("a") == b"before"
