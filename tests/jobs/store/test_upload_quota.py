"""UploadQuota count while they arrive, and leave room for results."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from llmserve.errors import RateLimited
from llmserve.jobs.store import upload_quota
from llmserve.jobs.store.files import FileLimits
from llmserve.jobs.store.folder import Folder, NoRoom
from llmserve.jobs.store.upload_quota import AT_ONCE_MAX, UploadQuota


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_uploads_that_arrive_count_with_complete_ones(tmp_path: Path) -> None:
    uploads = UploadQuota(Folder(tmp_path), FileLimits(bytes_max=100))
    uploads.stored_bytes = 40
    first, second = uploads.new_file("red"), uploads.new_file("blue")
    first.write(b"x" * 30)
    second.write(b"x" * 30)
    with pytest.raises(NoRoom) as full:
        second.write(b"x")
    assert (full.value.refusal.status, full.value.refusal.code) == (400, "files_bytes_max")
    first.discard()
    second.write(b"x")


def test_uploads_leave_room_for_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    upload, results = UploadQuota(folder, FileLimits()).new_file("red"), folder.create()
    monkeypatch.setattr(upload_quota.shutil, "disk_usage", lambda path: Disk(1000, 890, 110))
    upload.write(b"x" * 10)
    with pytest.raises(NoRoom, match="of which 100 are for results"):
        upload.write(b"x" * 11)
    results.write(b"x" * 110)


def test_uploads_of_one_key_at_once_are_bounded(tmp_path: Path) -> None:
    uploads = UploadQuota(Folder(tmp_path), FileLimits())
    files = [uploads.new_file("red") for _ in range(AT_ONCE_MAX)]
    with pytest.raises(RateLimited, match="uploads in progress"):
        uploads.new_file("red")
    uploads.new_file("blue")
    files[0].close()
    uploads.new_file("red")
