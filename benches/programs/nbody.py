"""Floats in lists: five bodies under gravity."""

PI = 3.14159265358979323
MASS = 4 * PI * PI
DAYS = 365.24
BODIES = [
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, MASS],
    [4.841431442, -1.160320044, -0.103622044, 0.001660076 * DAYS, 0.007699011 * DAYS,
     -0.000069046 * DAYS, 0.000954792 * MASS],
    [8.343366718, 4.124798564, -0.403523417, -0.002767425 * DAYS, 0.004998528 * DAYS,
     0.000023042 * DAYS, 0.000285886 * MASS],
    [12.894369562, -15.111151402, -0.223307579, 0.002964601 * DAYS, 0.002378472 * DAYS,
     -0.000029659 * DAYS, 0.000043662 * MASS],
    [15.379697115, -25.919314610, 0.179258773, 0.002680678 * DAYS, 0.001628242 * DAYS,
     -0.000095159 * DAYS, 0.000051514 * MASS],
]  # fmt: skip
PAIRS = [(a, b) for i, a in enumerate(BODIES) for b in BODIES[i + 1 :]]


def advance(dt, steps):
    for _ in range(steps):
        for a, b in PAIRS:
            dx = a[0] - b[0]
            dy = a[1] - b[1]
            dz = a[2] - b[2]
            pull = dt * (dx * dx + dy * dy + dz * dz) ** -1.5
            to_b = b[6] * pull
            to_a = a[6] * pull
            a[3] -= dx * to_b
            a[4] -= dy * to_b
            a[5] -= dz * to_b
            b[3] += dx * to_a
            b[4] += dy * to_a
            b[5] += dz * to_a
        for body in BODIES:
            body[0] += dt * body[3]
            body[1] += dt * body[4]
            body[2] += dt * body[5]


def energy():
    total = 0.0
    for body in BODIES:
        total += 0.5 * body[6] * (body[3] ** 2 + body[4] ** 2 + body[5] ** 2)
    for a, b in PAIRS:
        distance = ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 + (a[2] - b[2]) ** 2) ** 0.5
        total -= a[6] * b[6] / distance
    return total


advance(0.01, 95_000)
print(round(energy(), 6))
