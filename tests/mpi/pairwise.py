"""Samples of a product of factors in which every pair of values occurs: the same sample on every rank."""

from itertools import combinations


def pairwise(factors, allowed):
    """Cases, as dictionaries, that contain each allowed pair of values of two factors at least once.

    `allowed` is asked about unfinished cases too: False as soon as what is chosen cannot be together.
    """
    missing = {}  # an ordered set
    for (a, left), (b, right) in combinations(factors.items(), 2):
        missing |= {((a, x), (b, y)): None for x in left for y in right if allowed({a: x, b: y})}
    cases = []
    while missing:
        pair = next(iter(missing))
        case = _complete(dict(pair), factors, allowed, missing)
        del missing[pair]  # also where no case can hold it
        if case is not None:
            case = {name: case[name] for name in factors}
            cases.append(case)
            for covered in combinations(case.items(), 2):
                missing.pop(covered, None)
    return cases


def _complete(case, factors, allowed, missing):
    """The case with a value for every factor, each the one that covers most of what is missing."""
    name = next((name for name in factors if name not in case), None)
    if name is None:
        return case
    order = {other: index for index, other in enumerate(factors)}

    def gain(value):
        others = [(other, case[other]) for other in case]
        mine = (name, value)
        pairs = [(each, mine) if order[each[0]] < order[name] else (mine, each) for each in others]
        return sum(pair in missing for pair in pairs)

    for value in sorted(factors[name], key=gain, reverse=True):
        longer = {**case, name: value}
        if allowed(longer):
            found = _complete(longer, factors, allowed, missing)
            if found is not None:
                return found
    return None
