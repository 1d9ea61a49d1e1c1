"""Which characters a text must have for a regular expression of our rules to match it."""

import re

_HEAD = re.compile(r"\((?:\?(?:[:=]|<=|<!|!|i:))?")
_OPTIONAL = re.compile(r"[?*]|\{0|\{,")
_QUANTIFIER = re.compile(r"(?:[?*+]|\{[\d,]+\})[?+]?")
_LONGEST_RANGE = 64  # a class of more characters than this is no help


def needs(pattern: str) -> frozenset[str]:
    """Characters of which a text must have one for the pattern to match. Empty: the pattern does not tell.

    Most phrases lack the sign of most rules, and this is quicker to see than that the pattern fails."""
    return _needs(pattern, 0, len(pattern))


def _needs(pattern: str, start: int, end: int) -> frozenset[str]:
    ways: list[list[frozenset[str]]] = [[]]
    while start < end:
        sign, found = pattern[start], frozenset[str]()
        if sign == "|":
            ways.append([])
            start += 1
            continue
        if sign == "(":
            after = _closing(pattern, start)
            head = _HEAD.match(pattern, start)
            if head and head[0] not in ("(?!", "(?<!", "(?i:"):
                found = _needs(pattern, head.end(), after - 1)
        elif sign == "[":
            after = _class_end(pattern, start)
            found = _members(pattern[start + 1 : after - 1])
        elif sign == "\\":
            after = start + 2
            found = frozenset() if pattern[start + 1].isalnum() else frozenset(pattern[start + 1])
        else:
            after = start + 1
            found = frozenset() if sign in "^$." or sign.isdecimal() else frozenset(sign)
        quantifier = _QUANTIFIER.match(pattern, after)
        if found and not _OPTIONAL.match(pattern, after):
            ways[-1].append(found)
        start = quantifier.end() if quantifier else after
    best = [min(way, key=lambda found: (" " in found, len(found)), default=frozenset[str]()) for way in ways]
    return frozenset().union(*best) if all(best) else frozenset()


def _class_end(pattern: str, start: int) -> int:
    """Where a class of characters ends."""
    start += 1
    while pattern[start] != "]":
        start += 2 if pattern[start] == "\\" else 1
    return start + 1


def _closing(pattern: str, start: int) -> int:
    """Where a group ends."""
    depth = 0
    while True:
        sign = pattern[start]
        if sign == "[":
            start = _class_end(pattern, start)
            continue
        depth += (sign == "(") - (sign == ")")
        start += 2 if sign == "\\" else 1
        if not depth:
            return start


def _members(inside: str) -> frozenset[str]:
    """The characters of a class; empty if digits or a kind of characters are among them."""
    if inside[0] == "^" or re.search(r"\\[^\W_]", inside):
        return frozenset()
    signs = re.findall(r"\\?(.)(?:-\\?([^\]\\]))?", inside)
    members = {chr(code) for first, last in signs for code in range(ord(first), ord(last or first) + 1)}
    return (
        frozenset(members) if len(members) <= _LONGEST_RANGE and not any(map(str.isdecimal, members)) else frozenset()
    )
