"""Packs Debian's compiled time zones for the guest's file system.

usage: pack_zoneinfo.py ZONEINFO OUT

Writes into OUT: `zoneinfo.data`, each distinct file once; `zoneinfo.index`, for each path in the guest its name and a NUL,
then offset and length in the data as 32-bit little-endian numbers.
"""

import sys
from pathlib import Path

GUEST_FOLDER = "/usr/share/zoneinfo"

# Tables of the folder that programs read; the rest is for tools.
TABLES = ("zone1970.tab", "zone.tab", "iso3166.tab")
# The last two are links that depend on the machine.
LEFT_OUT = ("posix", "right", "localtime", "posixrules")

# A block's header: 4 bytes magic, 1 version, 15 unused, six counts of 4 bytes.
COUNTS_AT = 20
HEADER_LENGTH = 44


def without_version_1(data: bytes) -> bytes:
    """Empties the 32-bit block of a TZif file (RFC 9636, section 3): whoever reads version 2 skips it."""
    assert data[4:5] >= b"2", "no 64-bit block"
    isutcnt, isstdcnt, leapcnt, timecnt, typecnt, charcnt = (
        int.from_bytes(data[at:at + 4]) for at in range(COUNTS_AT, HEADER_LENGTH, 4)
    )
    end = HEADER_LENGTH + timecnt * 5 + typecnt * 6 + charcnt + leapcnt * 8 + isstdcnt + isutcnt
    return data[:COUNTS_AT] + bytes(HEADER_LENGTH - COUNTS_AT) + data[end:]


def main() -> None:
    folder, out = (Path(argument) for argument in sys.argv[1:])
    data = bytearray()
    index = bytearray()
    places: dict[bytes, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name.split("/")[0] in LEFT_OUT:
            continue
        content = path.read_bytes()
        if content.startswith(b"TZif"):
            content = without_version_1(content)
        elif name not in TABLES:
            continue
        if content not in places:
            places[content] = len(data)
            data.extend(content)
        index += f"{GUEST_FOLDER}/{name}".encode() + b"\0"
        index += places[content].to_bytes(4, "little") + len(content).to_bytes(4, "little")
    (out / "zoneinfo.data").write_bytes(data)
    (out / "zoneinfo.index").write_bytes(index)
    print(f"{len(places)} time zone files, {len(data)} bytes")


main()
