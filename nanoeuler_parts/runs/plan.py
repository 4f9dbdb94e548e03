"""The length of a run: a number of steps, or as many steps as fit into the minutes."""

PLANNED_FROM = 5     # the step of a process after which the length of a run by minutes is planned

class Progress:
    """Measures the steps of a run in this process.  now: seconds, see `Run.elapsed`
    step_time: mean seconds per step, including the log and later validations.  Step 1 and the first
    validation may include compilation.  Step 1 therefore counts only until step 2 is done, and the
    first validation does not count at all."""

    def __init__(self, now):
        self.steps, self.has_validated = 0, False
        self.printed = now                   # when the last line was printed

    def count_step(self, seconds, now):
        self.steps += 1
        if self.steps == 1:
            self.step_time, self.timed_from = seconds, now
        else:
            self.step_time = (now - self.timed_from) / (self.steps - 1)

    def count_validation(self, seconds):
        if self.steps and not self.has_validated:
            self.timed_from += seconds
            self.has_validated = True

    def is_due(self, step):
        """Is it time to plan the run again, and to print a line?  After step 5 of this process, and
        then after every step whose number is divisible by 20."""
        return self.steps == PLANNED_FROM or (self.steps > PLANNED_FROM and step % 20 == 0)

class Plan:
    """The length of a run: `steps`, or if that is None, as many as fit into the minutes.
    B: rows of a batch.  held_out: (rows, tokens per row) of the validation data.  most_tokens: of
    the final validation"""

    def __init__(self, steps, minutes, B, held_out, most_tokens):
        self.steps, self.minutes, self.B = steps, minutes, B
        self.held_out, self.most_tokens = held_out, most_tokens

    def is_open(self, step, n_steps, progress):
        """May the length still change after this step?  The length of a run by minutes is planned
        until its last tenth begins."""
        in_last_tenth = n_steps and step > 0.9 * n_steps
        is_time = progress.is_due(step) or progress.steps < PLANNED_FROM
        return is_time and not self.steps and not in_last_tenth

    def n_steps(self, step, n_steps, elapsed, progress):
        """The number of steps that fit into the minutes, of which `elapsed` seconds are over after
        this step.  The last validation takes part of that time, see `final_rows`.  Before
        PLANNED_FROM steps are measured, this only ends a run whose minutes are over."""
        left = (60 * self.minutes - elapsed) / progress.step_time    # in steps
        if progress.steps >= PLANNED_FROM:
            check = self.most_rows() / (3 * self.B)      # in steps: forward is a third of a step
            in_part = (3 * left - step) / 4              # solves n + (step + n) / 3 = left
            return step + max(0, int(max(left - check, in_part)))
        return step if left <= 0 else n_steps

    def most_rows(self):
        """The largest number of held-out rows of the final validation: all, or rows of
        `most_tokens` tokens in all, spread evenly over a larger part"""
        n, T = self.held_out
        return min(n, max(1, self.most_tokens // T))

    def final_rows(self, n_steps):
        """The number of held-out rows of the final validation: `most_rows`, but in a run by minutes
        at most as many as were trained on.  A forward pass takes a third of a step, so the
        validation then takes at most a quarter of the minutes, also on a slow machine."""
        most = self.most_rows()
        return most if self.steps else max(1, min(most, n_steps * self.B))

def steps_planned(state, options):
    """Total number of steps in --minutes, at the pace so far; None if no time was measured"""
    if not state.elapsed:
        return None
    at_this_pace = state.step * 60 * options.minutes / state.elapsed
    return max(state.step, int(min(at_this_pace, 1 << 40)))
