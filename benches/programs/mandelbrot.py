"""Floats: the escape times of a grid of points."""


def inside(width, height, limit):
    count = 0
    steps = 0
    for y in range(height):
        ci = 2.0 * y / height - 1.0
        for x in range(width):
            cr = 3.0 * x / width - 2.0
            zr = zi = 0.0
            for _ in range(limit):
                a = zr * zr
                b = zi * zi
                if a + b > 4.0:
                    break
                zi = 2.0 * zr * zi + ci
                zr = a - b + cr
                steps += 1
            else:
                count += 1
    return count, steps


print(*inside(420, 340, 90))
