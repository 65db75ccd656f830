"""Spans of time: what a worker does when. For `KDIST_TRACE`, which writes them to files, and for who adds them up."""

from kdist.tracing.meter import Meter, Totals
from kdist.tracing.spans import Span, span, timed
from kdist.tracing.trace_file import begin, flush

__all__ = ["Meter", "Span", "Totals", "begin", "flush", "span", "timed"]
