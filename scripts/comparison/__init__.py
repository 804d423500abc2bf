"""Dialects compared by their whole course of score against KL, at equal budgets, each tuned by the same small search.

frontier is the arithmetic; tasks says on what, entries what is compared, runs how one run is started and kept, judge
how its policies are judged, search which rate is chosen, results what is written, page what is made of that.
"""
