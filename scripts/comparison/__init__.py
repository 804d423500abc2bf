"""Dialects compared by their whole course of score against KL, at equal budgets, each tuned by the same small search.

tasks says on what (folders makes their models), entries what is compared, runs how one run is started, kept and judged
(judge), frontier is the arithmetic of courses, results which rate is chosen and what is written, page what is made of
that.
"""
