"""Generators: pipelines, delegation and send."""


def numbers(count):
    i = 0
    while i < count:
        yield i
        i += 1


def pick(source):
    for x in source:
        if x % 3:
            yield x * 2


def tree(depth):
    if depth:
        yield from tree(depth - 1)
        yield depth
        yield from tree(depth - 1)


def average():
    total = 0
    count = 0
    value = None
    while True:
        value = yield value
        total += value
        count += 1
        value = total // count


def run(count):
    picked = sum(pick(numbers(count)))
    nodes = sum(x for x in tree(17))
    mean = average()
    next(mean)
    for i in range(count // 2):
        last = mean.send(i)
    return picked, nodes, last


print(*run(2_600_000))
