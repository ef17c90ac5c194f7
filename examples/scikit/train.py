"""Fit two scikit-learn models to handwritten digits, and save the better one."""

import argparse
import os
import pickle

import fsspec  # the hosts have it; it also writes to gs://
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.neighbors import KNeighborsClassifier

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--neighbours", type=int, default=3)
args = parser.parse_args()

train, test, train_labels, test_labels = train_test_split(*load_digits(return_X_y=True), random_state=0)
models = {"logistic": LogisticRegression(max_iter=2000, C=0.01), "neighbours": KNeighborsClassifier(args.neighbours)}
scores = {name: cross_val_score(model, train, train_labels).mean() for name, model in models.items()}
for name, score in scores.items():
    print(f"{name}: {score:.3f}")
best = models[max(scores, key=scores.get)].fit(train, train_labels)
with fsspec.open(os.path.join(os.environ.get("JOB_DIR", "output"), "model.pickle"), "wb") as file:
    pickle.dump(best, file)
print(f"Final metrics after 1 steps, accuracy: {best.score(test, test_labels):.3f}")
