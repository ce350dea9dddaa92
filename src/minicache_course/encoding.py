"""Why a file is no UTF-8, which is what Python takes a source file for, in words that say what to do."""

from __future__ import annotations

import codecs
import tokenize
from pathlib import Path

from minicache_course.finder import show

_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"} | {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""What a file in another encoding begins with; those of UTF-32 begin as those of UTF-16 do."""


def encoding_fault(file: Path) -> str:
    """Such as "labs/a.py is not UTF-8: byte 0xE9 in line 3; save it as UTF-8", or "" if the file can be read.

    A file may name its encoding in a comment in its first lines, as Python allows.
    """
    content = file.read_bytes()
    for mark, name in _MARKS.items():
        if content.startswith(mark):
            return f"{show(file)} is {name}: save it as UTF-8"
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        return f"{show(file)} has a null byte in line {line}, like UTF-16 or binary files: save it as UTF-8"
    try:
        with file.open("rb") as stream:
            encoding, _ = tokenize.detect_encoding(stream.readline)
        content.decode(encoding)
    except UnicodeDecodeError as error:
        return _undecodable(file, encoding, error)
    except SyntaxError:  # in the first two lines, or an encoding that does not exist
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            return _undecodable(file, "utf-8", error)
        return f"{show(file)} declares an unknown encoding in its first lines: remove the comment"
    return ""


def _undecodable(file: Path, encoding: str, error: UnicodeDecodeError) -> str:
    line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
    return f"{show(file)} is not {encoding.upper()}: byte 0x{byte:02X} in line {line}; save it as UTF-8"
