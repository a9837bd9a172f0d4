"""Measuring ring attention: cases, clocks, the two modes, and reports (`bench_attention.py`)."""
