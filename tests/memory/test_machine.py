"""Memories against a dict, in RAM and on disk, without and with a capacity."""

import shutil
import tempfile
from pathlib import Path
from uuid import uuid4

from hypothesis import HealthCheck, settings

from memstore.memory import Finding, verify
from tests.memory.machine import MemoryMachine


class InRam(MemoryMachine):
    def new_url(self) -> str:
        return f"ram:{uuid4()}"


class InRamWithCapacity(InRam):
    capacity = 3


class OnDisk(MemoryMachine):
    def new_url(self) -> str:
        self.folder = Path(tempfile.mkdtemp())
        return str(self.folder / "m")

    def findings(self) -> list[Finding]:
        # In this process: starting another one takes a hundred times as long as all the rest.
        return verify.check(self.memory._shared.store)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


class OnDiskWithCapacity(OnDisk):
    capacity = 3


TestInRam = InRam.TestCase
TestInRamWithCapacity = InRamWithCapacity.TestCase
TestOnDisk = OnDisk.TestCase
TestOnDiskWithCapacity = OnDiskWithCapacity.TestCase
for case, examples in ((TestInRam, 15), (TestInRamWithCapacity, 20), (TestOnDisk, 4), (TestOnDiskWithCapacity, 5)):
    case.settings = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
