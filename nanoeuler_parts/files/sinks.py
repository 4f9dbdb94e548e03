"""`--log-to`: sends the records of a training log to TensorBoard or Weights & Biases as well.

The .jsonl file (logs.py) stays the log of a run, and --resume needs only that file.  `Sinks` calls
one object for each chosen service.  Such a class has three methods: `open` at the first record,
`write` at each record, and `close`.
"""
import contextlib
import html
import os
import shlex
import time
from dataclasses import asdict

from bpe import need, note, UserError

FLUSH_AFTER = 5              # seconds; a flush waits for the disk, so not every step makes one
ID_LENGTH = 12               # hexadecimal digits

def curves_of(record):
    """{name: value} of a record's numbers.  The losses of the heads are loss/head_0, ..."""
    numbers = {name: float(x) for name, x in record.items() if isinstance(x, (int, float))}
    for name in ("step", "n_steps", "windows"):          # they describe the record
        numbers.pop(name, None)
    return numbers | {f"loss/head_{k}": x for k, x in enumerate(record.get("heads", ()))}

class TensorBoard:
    """Event files in the folder NAME.events/ID, one for each process of the run.
    tensorboardX's SummaryWriter is not used: on a full disk its thread ends without a word, and the
    training loop would then wait for the thread forever."""

    def __init__(self, out):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2
        self.writer, self.text = event_file_writer.EventsWriter, summary.text
        self.events, self.summaries = event_pb2, summary_pb2
        self.folder = f"{out.removesuffix('.bin')}.events"
        self.row = "TensorBoard", f"tensorboard --logdir {shlex.quote(self.folder)}"

    def open(self, run_id, name, settings, step):
        """A session that starts at a step hides all older events from this step on: an interrupted
        run logged them but did not save them."""
        folder = os.path.join(os.path.abspath(self.folder), run_id)
        os.makedirs(folder, exist_ok=True)
        self.file = self.writer(os.path.join(folder, "events"), f".{time.time_ns()}")
        self.flushed = time.monotonic()
        start = self.events.SessionLog(status=self.events.SessionLog.START)
        self.add(step, session_log=start)

    def write(self, step, curves, texts):
        values = [self.summaries.Summary.Value(tag=tag, simple_value=x)
                  for tag, x in curves.items()]
        for tag, text in texts.items():      # as a block of code, because the page reads Markdown
            block = "".join(f"    {line}\n" for line in text.splitlines())
            values += self.text(tag, block).value
        self.add(step, summary=self.summaries.Summary(value=values))

    def add(self, step, **content):
        self.file.write_event(self.events.Event(wall_time=time.time(), step=step, **content))
        if time.monotonic() - self.flushed > FLUSH_AFTER:
            self.file.flush()
            self.flushed = time.monotonic()

    def close(self):
        self.file.close()

class WeightsAndBiases:
    """A run of Weights & Biases.  Its records have steps that only grow, so the service ignores
    the steps that a resumed run repeats.  WANDB_MODE=offline works without an account."""

    def __init__(self, out):
        import wandb
        self.wandb = wandb
        if wandb.setup().settings.mode == "online":
            try:
                wandb.login()                # may ask for the key, so not during the run
            except wandb.Error as e:
                reason = str(e).rstrip(".")
                raise UserError(f"wandb: {reason}, or set WANDB_MODE=offline") from None
        self.project = os.environ.get("WANDB_PROJECT", "nanoeuler")
        self.row = "W&B", f"project {self.project}"

    def open(self, run_id, name, settings, step):
        self.run = self.wandb.init(project=self.project, id=run_id, resume="allow", name=name,
                                   config=settings, settings=self.wandb.Settings(console="off"))

    def write(self, step, curves, texts):
        pages = {tag: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")
                 for tag, text in texts.items()}
        self.run.log(curves | pages, step=step)

    def close(self):
        self.run.finish()

SERVICES = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}

class Sinks:
    """The services that --log-to names.  Their packages are imported at once, so that a missing one
    is reported before the run.  A service that fails later ends with a note, and the run continues.
    names: separated by commas; out: the checkpoint"""

    def __init__(self, names, out):
        chosen = [name.strip() for name in names.split(",") if names]
        for name in chosen:
            need(name in SERVICES, f"--log-to is {names}, expected {', '.join(SERVICES)}, or both "
                 f"with a comma between them")
        self.name, self.is_open = os.path.basename(out), False
        self.services = [SERVICES[name](out) for name in dict.fromkeys(chosen)]
        self.rows = [service.row for service in self.services]       # for a table of settings

    def write(self, record, state, cfg):
        """Sends a log record.  The first one opens the services, because the run's identity is the
        hash of that line of its log (`log_identity`).  --resume finds the same identity."""
        step, texts = record["step"], {k: x for k, x in record.items() if isinstance(x, str)}
        if self.services and not self.is_open:
            run_id, settings = state.log_sha256[:ID_LENGTH], asdict(cfg)
            settings |= state.options
            self.each(lambda service: service.open(run_id, self.name, settings, step))
            self.is_open = True
        curves = curves_of(record)
        self.each(lambda service: service.write(step, curves, texts))

    def close(self):
        if self.is_open:
            self.each(lambda service: service.close())

    def each(self, act):
        """Calls act(service).  A service may fail with any error of its package."""
        for service in self.services.copy():
            try:
                act(service)
            except Exception as e:
                self.services.remove(service)
                reason = " ".join(str(e).split()) or type(e).__name__
                note(f"no more records go to {service.row[0]}: {reason}; the run "
                     f"and its log continue")
                with contextlib.suppress(Exception):
                    service.close()
