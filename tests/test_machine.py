"""Memory that is freed is kept by the commands and their workers, unless the user set glibc's allocator otherwise."""

import os
import subprocess
import sys

import pytest

# Page faults of eight buffers of 64 MiB, one after the other, behind what is given.
PROGRAM = """
import resource
{}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(sum(faults() for _ in range(8)))
"""
KEEP = "from metatokens.machine import keep_freed_memory; keep_freed_memory()"
COMMAND = "from metatokens import cli; cli.main(lambda **_: None)"


def faults(program, **variables):
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            environment[name] = value
    command = [sys.executable, "-c", PROGRAM.format(program)]
    printed = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    ).stdout
    return int(printed)


@pytest.fixture(scope="module", autouse=True)
def glibc():
    if sys.platform != "linux" or faults("") < 1000:
        pytest.skip("the C library of this machine is not glibc, or another allocator is preloaded")


@pytest.mark.parametrize("program", [KEEP, COMMAND], ids=["the function", "a command"])
def test_freed_memory_is_handed_out_again(program):
    assert faults(program) < 100


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MALLOC_ARENA_TEST", "8"), ("GLIBC_TUNABLES", "glibc.malloc.arena_test=8")],
)
def test_settings_of_the_user_hold(variable, value):
    assert faults(KEEP, **{variable: value}) > 1000


FRAGMENTED = """
def resident():
    return int(open("/proc/self/statm").read().split()[1])
blocks = [bytearray(b"x") * 2**20 for _ in range(200)]
del blocks[::2]
before = resident()
return_freed_memory()
print(resident() - before)
"""


def test_a_fragmented_heap_is_given_back():
    program = f"{KEEP}\nfrom metatokens.machine import return_freed_memory\n{FRAGMENTED}"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    pages = 2**20 // os.sysconf("SC_PAGE_SIZE")  # of a block
    assert int(printed) < -90 * pages
