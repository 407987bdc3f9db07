"""Compares the virtual functions of Peerway's backend with those of the backends in the wheel."""

import glob
import importlib
import os
import re
import subprocess

import nixl_of_tests as of_tests


def directory():
    """The plugin directory of the wheel."""
    package = importlib.import_module(of_tests.PACKAGE)
    site = os.path.dirname(os.path.dirname(package.__file__))
    return os.path.join(site, f".{of_tests.PACKAGE}.mesonpy.libs", "plugins")


def virtual_functions(library, engine):
    """The mangled names of a class's virtual functions, in order, without the name of the class."""
    symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    table = re.search(rf"^([0-9a-f]+) \w _ZTV{len(engine)}{engine}$", symbols, re.M)
    at = int(table[1], 16)
    relocations = subprocess.run(
        ["readelf", "--relocs", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    # The entries are addresses in this plugin, and names in the wheel's. Both are resolved to
    # names.
    names = dict(re.findall(r"^([0-9a-f]+) \w (_ZN\S+)$", symbols, re.M))
    entries = {}
    for line in relocations.splitlines():
        fields = line.split()
        if len(fields) < 4 or not re.fullmatch(r"[0-9a-f]{12,16}", fields[0]):
            continue
        if "R_X86_64_64" in fields[2]:
            entries[int(fields[0], 16)] = fields[4]
        elif "R_X86_64_RELATIV" in fields[2]:
            entries[int(fields[0], 16)] = names.get(fields[3].rjust(16, "0"), fields[3])
    found = []
    # The first two entries are the offset to the whole object and the type information.
    for slot in itertools_count(at + 16):
        name = entries.get(slot, "")
        function = re.fullmatch(r"_ZN(K?)(\d+)(\S+)", name)
        if not function:
            return found
        owner, rest = int(function[2]), function[3]
        found.append(function[1] + rest[owner:])


def itertools_count(start):
    while True:
        yield start
        start += 8


def test_virtual_functions_are_in_the_order_of_this_nixl():
    (theirs,) = glob.glob(os.path.join(directory(), "libplugin_POSIX.so"))
    (ours,) = glob.glob(os.path.join(directory(), "libplugin_PEERWAY.so"))
    expected = virtual_functions(theirs, "nixlPosixEngine")
    assert len(expected) == 27, expected
    # The names of the two destructors may differ between compilers.
    assert virtual_functions(ours, "Engine")[2:] == expected[2:]


def test_the_wheels_own_backends_are_still_there():
    found = {os.path.basename(path) for path in glob.glob(os.path.join(directory(), "*.so"))}
    assert {"libplugin_UCX.so", "libplugin_POSIX.so", "libplugin_PEERWAY.so"} <= found
