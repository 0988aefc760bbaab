"""Lesson 0's exercises as readers write them: right answers that must pass, wrong ones and the mistake each shows."""

import math

import torch

# log_normalizer(s, tau)


def right_loop(s, tau):
    values = []
    for i in range(len(s)):
        differences = [(s[i, j] - s[i, i]).item() / tau for j in range(len(s)) if j != i]
        largest = max(differences)
        values.append(largest + math.log(sum(math.exp(d - largest) for d in differences) / len(differences)))
    return torch.tensor(values)


def right_removed_diagonal(s, tau):
    size = s.shape[0]
    negatives = s[~torch.eye(size, dtype=torch.bool)].reshape(size, size - 1)
    return torch.logsumexp(negatives / tau, dim=1) - torch.diag(s) / tau - math.log(size - 1)


def right_in_double(s, tau):
    difference = (s.double() - s.double().diag().unsqueeze(1)) / tau
    weight = difference.exp().fill_diagonal_(0)
    return (weight.sum(1) / (len(s) - 1)).log().float()


def positive_left_in(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().mean(1).log()


def positive_left_in_stable(s, tau):
    return torch.logsumexp(s / tau, 1) - s.diag() / tau - math.log(len(s))


def positive_left_in_but_counted_out(s, tau):
    return torch.logsumexp((s - s.diag()[:, None]) / tau, 1) - math.log(len(s) - 1)


def diagonal_zeroed_before_exp(s, tau):
    difference = ((s - s.diag()[:, None]) / tau).fill_diagonal_(0)
    return difference.exp().sum(1).div(len(s) - 1).log()


def sum_for_mean(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().fill_diagonal_(0).sum(1).log()


def mean_over_the_whole_row(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().fill_diagonal_(0).mean(1).log()


def times_tau(s, tau):
    difference = (s - s.diag()[:, None]) * tau
    return difference.exp().fill_diagonal_(0).sum(1).div(len(s) - 1).log()


def own_score_not_taken_off(s, tau):
    return torch.logsumexp((s / tau).fill_diagonal_(-math.inf), 1) - math.log(len(s) - 1)


def columns(s, tau):
    difference = (s - s.diag()) / tau
    return torch.logsumexp(difference.fill_diagonal_(-math.inf), 0) - math.log(len(s) - 1)


def broadcast_the_other_way(s, tau):
    difference = (s - s.diag()) / tau
    return torch.logsumexp(difference.fill_diagonal_(-math.inf), 1) - math.log(len(s) - 1)


def log10(s, tau):
    return right_loop(s, tau) * math.log10(math.e)


def log10_naive(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().fill_diagonal_(0).sum(1).div(len(s) - 1).log10()


def log2(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().fill_diagonal_(0).sum(1).div(len(s) - 1).log2()


def log_forgotten(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().fill_diagonal_(0).sum(1) / (len(s) - 1)


def mean_of_the_exponents(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.sum(1) / (len(s) - 1)


def overflows(s, tau):
    difference = (s - s.diag()[:, None]) / tau
    return difference.exp().fill_diagonal_(0).sum(1).div(len(s) - 1).log()


# recall_at_1(s)


def right_rank(s):
    hits = 0
    for i, row in enumerate(s.tolist()):
        if all(row[i] > other for j, other in enumerate(row) if j != i):
            hits += 1
    return 100 * hits / len(s)


def right_count_of_beaten(s):
    beaten = (s.diag().unsqueeze(1) > s).sum(dim=1)
    return 100 * (beaten == len(s) - 1).float().mean()


def at_least_as_good(s):
    return 100 * (s.diag()[:, None] >= s).all(dim=1).double().mean().item()


def best_is_argmax(s):
    return (s.argmax(dim=1) == torch.arange(len(s))).double().mean().item() * 100


def not_beaten(s):
    rivals = 0
    for i in range(len(s)):
        rivals += any(s[i, j] >= s[i, i] for j in range(len(s)) if j != i)
    return 100 * (1 - rivals / len(s))


def down_the_columns(s):
    return right_rank(s.T)


def share(s):
    return right_rank(s) / 100


def number_of_hits(s):
    return sum(all(row[i] > other for j, other in enumerate(row) if j != i) for i, row in enumerate(s.tolist()))


def above_itself_too(s):
    return 100.0 * (s.diag()[:, None] > s).all(dim=1).float().mean()


def missed(s):
    return 100 - right_rank(s)


EXERCISES = {
    "log_normalizer": {
        "right": [right_loop, right_removed_diagonal, right_in_double],
        "wrong": [
            (positive_left_in, "positive left in"),
            (positive_left_in_stable, "positive left in"),
            (positive_left_in_but_counted_out, "positive left in, divided by B-1"),
            (diagonal_zeroed_before_exp, "positive left in, divided by B-1"),
            (sum_for_mean, "sum for mean"),
            (mean_over_the_whole_row, "divided by B"),
            (times_tau, "multiplied by tau"),
            (own_score_not_taken_off, "not shifted"),
            (columns, "texts as anchors"),
            (broadcast_the_other_way, "shifted by column"),
            (log10, "base 10"),
            (log10_naive, "base 10"),
            (log2, "base 2"),
            (log_forgotten, "no log"),
            (mean_of_the_exponents, "mean of logs"),
            (overflows, "overflow"),
        ],
    },
    "recall_at_1": {
        "right": [right_rank, right_count_of_beaten],
        "wrong": [
            (at_least_as_good, "ties count as hits"),
            (best_is_argmax, "argmax"),
            (not_beaten, "NaN counts as a hit"),
            (down_the_columns, "columns for rows"),
            (share, "fraction for percent"),
            (number_of_hits, "count for percent"),
            (above_itself_too, "own caption as rival"),
            (missed, "misses for hits"),
        ],
    },
}
