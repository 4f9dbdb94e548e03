"""The loss of the verb `rl`: advantages within a group of answers to one question, clipped
importance ratios, and a penalty on the KL divergence to the model at step 0.

    Schulman et al. 2017    Proximal policy optimization algorithms: the clipped ratio
    Schulman 2020           Approximating KL divergence: the estimator k3
    Shao et al. 2024        DeepSeekMath, 4.1: group relative policy optimization (GRPO)
    Yu et al. 2025          DAPO, 3.3: the mean over all tokens of a batch
    Liu et al. 2025         Understanding R1-Zero-like training: no division by the deviation
"""
import numpy as np

SMALL = 1e-4     # added to a standard deviation, so that rounding errors are not amplified

def advantages(rewards, divides):
    """A = r - mean(r) within a group                    Liu et al. 2025, 3.2
    divides: A = (r - mean(r)) / (std(r) + SMALL)        Shao et al. 2024, 4.1.2
    rewards (Q, G): of G answers to each of Q questions, NaN where the reward is unknown -> (Q, G)
    An answer with an unknown reward has no part in the mean, and its advantage is 0.  So is that
    of all answers of a group with equal rewards: such a group has no signal."""
    found = np.zeros(rewards.shape)
    for row, r in zip(found, rewards):
        known = ~np.isnan(r)
        r = r[known]
        if r.size and r.min() < r.max():     # the difference to a rounded mean need not be 0
            row[known] = (r - r.mean()) / (r.std() + SMALL if divides else 1.0)
    return found

def grpo_loss(logp, old, reference, is_answer, advantage, clip, kl):
    """loss = -mean of [min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) - kl k3] over all tokens
        ratio = pi(token) / pi_old(token) = exp(logp - old)      Schulman et al. 2017, eq. 7
        k3 = exp(d) - 1 - d,   d = log ref(token) - log pi(token)        Schulman 2020
    With CE = -log pi, and [ ] = 1 where the ratio is not clipped, else 0,
        d loss / d CE = ([ ] ratio A + kl (exp(d) - 1)) / N
    pi is the model, pi_old the one that sampled the answers, ref the one at step 0.  k3 is never
    negative, and its mean over tokens that pi samples is KL(pi || ref).
    logp, old, reference (B, T): log-probabilities of the tokens, nats, float64
    is_answer (B, T): the N tokens of answers;  advantage (B,)
    -> measures, and d loss / d CE (B, T) float64
    kl: the mean of k3, nats per token.  clipped: the share of tokens whose ratio is clipped."""
    n, A = max(1, np.count_nonzero(is_answer)), advantage[:, None]
    with np.errstate(over="ignore", invalid="ignore"):   # `train` reports a loss that is no number
        ratio = np.exp(logp - old)
        is_clipped = np.where(A > 0, ratio > 1 + clip, ratio < 1 - clip) & is_answer & (A != 0)
        gain = np.where(is_clipped, np.clip(ratio, 1 - clip, 1 + clip), ratio) * A
        d = reference - logp
        k3 = np.exp(d) - 1 - d
        measures = dict(loss=-(gain - kl * k3)[is_answer].sum() / n,
                        kl=k3[is_answer].sum() / n, clipped=is_clipped.sum() / n)
        slope = np.where(is_clipped, 0.0, ratio * A) + kl * (np.exp(d) - 1)
    return measures, np.where(is_answer, slope, 0.0) / n
