"""Measures activities of a worker as spans. `KDIST_TRACE` writes them to files; `Meter` adds them up."""

from kdist.tracing.meter import Meter, Totals
from kdist.tracing.spans import Span, span, timed
from kdist.tracing.trace_file import begin, flush

__all__ = ["Meter", "Span", "Totals", "begin", "flush", "span", "timed"]
