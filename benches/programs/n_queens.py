"""Search: the queens puzzle by bit masks and by sets."""


def masks(size, columns, left, right):
    full = (1 << size) - 1
    if columns == full:
        return 1
    count = 0
    free = full & ~(columns | left | right)
    while free:
        place = free & -free
        free ^= place
        count += masks(size, columns | place, (left | place) << 1, (right | place) >> 1)
    return count


def sets(size, row, columns, rising, falling):
    if row == size:
        return 1
    count = 0
    for column in range(size):
        if column in columns or row + column in rising or row - column in falling:
            continue
        columns.add(column)
        rising.add(row + column)
        falling.add(row - column)
        count += sets(size, row + 1, columns, rising, falling)
        columns.discard(column)
        rising.discard(row + column)
        falling.discard(row - column)
    return count


print(masks(12, 0, 0, 0), *(sets(size, 0, set(), set(), set()) for size in (10, 10, 10)))
