"""Generate N random people for the census example with a seed: `python people.py N SEED >train.csv`."""

import csv
import math
import random
import sys

COLUMNS = ("age", "education_years", "hours_per_week", "married", "income_bracket")


def people(count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        age, years, hours = chance.randint(17, 80), chance.randint(4, 20), chance.randint(10, 70)
        married = chance.choice(("yes", "no"))
        score = 0.5 * (years - 12) + 0.1 * (hours - 40) + 0.05 * (age - 40) + (1.0 if married == "yes" else -1.0)
        rich = chance.random() < 1 / (1 + math.exp(-2 * score))
        yield age, years, hours, married, ">50K" if rich else "<=50K"


if __name__ == "__main__":
    out = csv.writer(sys.stdout)
    out.writerow(COLUMNS)
    out.writerows(people(int(sys.argv[1]), int(sys.argv[2])))
