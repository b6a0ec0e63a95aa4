"""Search: a depth-first sudoku solver over sets of candidates."""

PUZZLES = [
    "4.....8.5.3..........7......2.....6.....8.4......1.......6.3.7.5..2.....1.4......",
    "..............3.85..1.2.......5.7.....4...1...9.......5......73..2.1........4...9",
    "85...24..72......9..4.........1.7..23.5...9...4...........8..7..17..........36.4.",
]
DIGITS = "123456789"
ROWS = [[9 * row + column for column in range(9)] for row in range(9)]
COLUMNS = [[9 * row + column for row in range(9)] for column in range(9)]
BOXES = [
    [9 * (top + row) + left + column for row in range(3) for column in range(3)]
    for top in (0, 3, 6)
    for left in (0, 3, 6)
]
UNITS = [[unit for unit in ROWS + COLUMNS + BOXES if cell in unit] for cell in range(81)]
PEERS = [{other for unit in UNITS[cell] for other in unit} - {cell} for cell in range(81)]


def assign(values, cell, digit):
    return all(eliminate(values, cell, other) for other in values[cell] if other != digit)


def eliminate(values, cell, digit):
    if digit not in values[cell]:
        return True
    values[cell] = values[cell].replace(digit, "")
    if not values[cell]:
        return False
    if len(values[cell]) == 1 and not all(
        eliminate(values, peer, values[cell]) for peer in PEERS[cell]
    ):
        return False
    for unit in UNITS[cell]:
        places = [place for place in unit if digit in values[place]]
        if not places or (len(places) == 1 and not assign(values, places[0], digit)):
            return False
    return True


def search(values, visited):
    visited[0] += 1
    cell = min(
        (place for place in range(81) if len(values[place]) > 1),
        key=lambda place: len(values[place]),
        default=None,
    )
    if cell is None:
        return values
    for digit in values[cell]:
        guess = list(values)
        if assign(guess, cell, digit):
            solved = search(guess, visited)
            if solved:
                return solved
    return None


def solve(puzzle):
    values = [DIGITS] * 81
    for cell, digit in enumerate(puzzle):
        if digit != "." and not assign(values, cell, digit):
            return None, 0
    visited = [0]
    return search(values, visited), visited[0]


def run(rounds):
    places = 0
    checks = []
    for turn in range(rounds):
        # The same puzzle under other names of the digits is searched in another order.
        factor = (1, 3, 7, 9)[turn % 4]
        names = "".join(str(int(digit) * factor % 10) for digit in DIGITS)
        renamed = str.maketrans(DIGITS, names[turn % 9 :] + names[: turn % 9])
        for puzzle in PUZZLES:
            solved, visited = solve(puzzle.translate(renamed))
            places += visited
            checks.append(int("".join(solved)))
    return places, sum(checks) % 1_000_000_007


print(*run(54))
