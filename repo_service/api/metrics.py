"""What the service counts, for Prometheus; docs/operations.md explains every metric.

Labels have few values: routes by their template, never a path, a namespace or an id. None is called ``job`` or
``instance``, which Prometheus gives itself.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from anyio import CapacityLimiter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from repo_service.api.gates import Gate
from repo_service.api.readiness import Answer
from repo_service.domain.views import GarbageReport, ScrubReport
from repo_service.services.observer import Observer
from repo_service.version import FORMAT_VERSION, __version__

# When a counter began doubles the number of series and helps nobody here.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))


class Metrics(Observer):
    """The metrics of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"kvgraft_{name}", meaning, labels, registry=self.registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"kvgraft_{name}", meaning, labels, registry=self.registry)

        about = gauge("build_info", "1; the labels say what runs.", "version", "format_version", "python_version")
        about.labels(__version__, str(FORMAT_VERSION), platform.python_version()).set(1)

        self._requests = counter("http_requests", "Requests answered.", "method", "route", "status")
        self._seconds = Histogram(
            "kvgraft_http_request_seconds",
            "Time from a request's header to the end of its answer.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._received = counter("http_received_bytes", "Bytes of request bodies.", "method", "route")
        self._sent = counter("http_sent_bytes", "Bytes of answers' bodies.", "method", "route")
        self.running = gauge("http_requests_running", "Requests that are being answered.")
        self._errors = counter("errors", "Errors answered, by code.", "code")
        self._refused = counter("connections_refused", "Connections refused before any route.", "status")

        self._read = counter("chunks_read", "Chunks read and verified for a reader.")
        self._read_bytes = counter("chunk_read_bytes", "Bytes of the chunks read.")
        self._located = counter("chunk_urls", "URLs given to clients to fetch or put chunks at S3 themselves.")
        self._stored = counter("chunks_stored", "Chunks that arrived by a push.")
        self._stored_bytes = counter("chunk_stored_bytes", "Bytes of the chunks that arrived.")
        self._matches = counter("matches", "Questions for the longest stored prefix: hit or miss.", "result")
        self._asked = counter("match_blocks_asked", "Blocks in such questions.")
        self._found = counter("match_blocks_found", "Blocks of them that were found stored.")
        self._begun = counter("pushes_begun", "Pushes begun.")
        self._committed = counter("pushes_committed", "Pushes committed.")
        self._offered = counter("chunks_offered", "Chunks that pushes offered.")
        self._missing = counter("chunks_missing", "Chunks of those offered that had to be sent.")
        self._divergences = counter("divergences", "Pushes refused for other bytes under an existing block key.")
        self._failures = counter("verification_failures", "Stored objects that did not verify.", "found_by")

        self._runs = counter("job_runs", "Runs of gc and scrub in this process: ok or failed.", "kind", "outcome")
        self._ended = gauge("job_success_timestamp_seconds", "When gc or scrub last ended well here.", "kind")
        self._took = gauge("job_seconds", "How long the last such run took.", "kind")
        self._removed = counter("gc_removed", "Objects that garbage collection removed.", "kind")
        self._freed = counter("gc_freed_bytes", "Bytes of chunks that garbage collection freed.")
        self._unreadable = gauge("gc_unreadable", "Documents that the last collection could not read.")
        self._scrubbed = counter("scrub_read_bytes", "Bytes of chunks that scrubs read.")
        self._damaged = gauge("scrub_damaged", "Objects that the last scrub found damaged and could not write again.")

        # A first failure is a rise only from a zero that was there before.
        for found_by in "request", "check", "commit", "scrub":
            self._failures.labels(found_by)
        for job in "gc", "scrub":
            for outcome in "ok", "failed":
                self._runs.labels(job, outcome)
        for result in "hit", "miss":
            self._matches.labels(result)

        self._route = cache(self._of_route)
        self._status = cache(self._requests.labels)

    def _of_route(self, method: str, route: str) -> tuple[Histogram, Counter, Counter]:
        labels = method, route
        return self._seconds.labels(*labels), self._received.labels(*labels), self._sent.labels(*labels)

    def answered(self, method: str, route: str, status: str, seconds: float, received: int, sent: int) -> None:
        """Count a request; bytes are those of the bodies."""
        method = method if method in METHODS else "other"
        took, came, went = self._route(method, route)
        self._status(method, route, status).inc()
        took.observe(seconds)
        came.inc(received)
        went.inc(sent)

    def error(self, code: str) -> None:
        """An error went out as an answer."""
        self._errors.labels(code).inc()
        if code in ("chunk_corrupt", "document_corrupt"):
            self._failures.labels("request").inc()

    def refused(self, status: int) -> None:
        """A connection was refused before a route was found."""
        self._refused.labels(str(status)).inc()

    def read(self, size: int) -> None:
        self._read.inc()
        self._read_bytes.inc(size)

    def located(self, chunks: int) -> None:
        self._located.inc(chunks)

    def stored(self, size: int) -> None:
        self._stored.inc()
        self._stored_bytes.inc(size)

    def matched(self, asked: int, found: int) -> None:
        self._matches.labels("hit" if found else "miss").inc()
        self._asked.inc(asked)
        self._found.inc(found)

    def begun(self) -> None:
        self._begun.inc()

    def offered(self, chunks: int, missing: int) -> None:
        self._offered.inc(chunks)
        self._missing.inc(missing)

    def committed(self) -> None:
        self._committed.inc()

    def diverged(self) -> None:
        self._divergences.inc()

    def damaged(self, found_by: str, count: int) -> None:
        self._failures.labels(found_by).inc(count)

    def collected(self, report: GarbageReport, seconds: float) -> None:
        if report.dry_run:
            return
        self._done("gc", seconds)
        for kind in "artifacts", "chunks", "block_records", "manifests", "temp_files", "quarantined":
            self._removed.labels(kind).inc(getattr(report, kind))
        self._freed.inc(report.bytes)
        self._unreadable.set(len(report.unreadable))

    def scrubbed(self, report: ScrubReport, seconds: float) -> None:
        self._scrubbed.inc(report.bytes)
        if report.complete:
            self._done("scrub", seconds)
            self._damaged.set(report.damaged - sum(item.healed for item in report.damage))

    def failed(self, job: str) -> None:
        self._runs.labels(job, "failed").inc()

    def _done(self, job: str, seconds: float) -> None:
        self._runs.labels(job, "ok").inc()
        self._ended.labels(job).set_to_current_time()
        self._took.labels(job).set(seconds)


class Present(Collector):
    """What is read off when somebody asks: queues, connections, and whether store and index answer.

    Attributes
    ----------
    answers
        What the parts of the repository answered last.
    threads
        The limiter of the worker threads of all other routes, which only a running event loop has.
    connections
        Gives the number of open connections.
    """

    def __init__(self, gates: Mapping[str, Gate], limiters: Mapping[str, CapacityLimiter]) -> None:
        self._gates = gates
        self._limiters = limiters
        self.answers: Mapping[str, Answer] = {}
        self.threads: CapacityLimiter | None = None
        self.connections: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[Metric]:
        gates, limiters = self._gates.items(), dict(self._limiters)
        if self.threads is not None:
            limiters["threads"] = self.threads
        limits: dict[str, float] = {name: gate.count for name, gate in gates}
        running: dict[str, float] = {name: gate.running for name, gate in gates}
        waiting: dict[str, float] = {name: gate.waiting for name, gate in gates}
        for name, limiter in limiters.items():
            limits[name], running[name] = limiter.total_tokens, limiter.borrowed_tokens
            waiting[name] = limiter.statistics().tasks_waiting
        yield _gauge("queue_limit", "Most transfers, answers or threads at once.", "queue", limits)
        yield _gauge("queue_running", "Transfers, answers or threads that run now.", "queue", running)
        yield _gauge("queue_waiting", "Requests that wait for a turn.", "queue", waiting)
        refused = CounterMetricFamily("kvgraft_queue_refused", "Requests that found no turn: 503.", labels=["queue"])
        for name, gate in gates:
            refused.add_metric([name], gate.refused)
        yield refused
        yield _gauge("connections", "Open connections.", None, {"": self.connections()})
        found = self.answers
        up = {part: float(answer.problem is None) for part, answer in found.items()}
        yield _gauge("up", "1 if the store or the index answers.", "part", up)
        took = {part: answer.seconds for part, answer in found.items()}
        yield _gauge("probe_seconds", "How long the store or the index took to answer, or is waited for.", "part", took)
        pushes = found["index"].value if "index" in found else None
        yield _gauge(
            "pushes_running",
            "Running pushes that the index knows, of all replicas.",
            None,
            {} if pushes is None else {"": pushes},
        )


def _gauge(name: str, meaning: str, label: str | None, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"kvgraft_{name}", meaning, labels=[label] if label else [])
    for value, number in values.items():
        family.add_metric([value] if label else [], number)
    return family
