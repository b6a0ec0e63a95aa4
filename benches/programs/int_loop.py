"""Small integers: arithmetic, comparison and a branch in one loop."""


def run(count):
    total = 0
    for i in range(count):
        if i & 3 == 0:
            total += i * 2
        else:
            total ^= i
        total %= 1_000_003
    return total


print(run(6_500_000))
