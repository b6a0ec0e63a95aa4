"""Sorting: by key functions, by tuples and by values."""


def rows(count):
    state = 1
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2147483648
        yield state / 2147483648, state // 65536 % 1000, "k%d" % (state // 256 % 10000)


def run(count):
    table = list(rows(count))
    by_two = sorted(table, key=lambda row: (row[1], row[2]))
    by_name = sorted(table, key=lambda row: row[2])
    numbers = sorted(row[0] for row in table)
    down = sorted(table, key=lambda row: -row[0])
    table.sort()
    middle = count // 2
    return by_two[middle][2], by_name[middle][1], down[0] == table[-1], numbers[7] == table[7][0]


print(*run(120_000))
