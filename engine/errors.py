"""The one exception that stands for a mistake of the user's."""


class UserError(Exception):
    """A flag, file, data row or model that cannot work.

    Its message is all that the user sees (no stack trace, exit code 2), so it names the field or the file and line, the
    value found there, and what to do.
    """


class RunStopped(Exception):
    """A run that cannot go on, by no mistake that could have been caught before: a NaN, say.

    Its message says at which step, with which samples, and what to look at. Exit code 1; restart points stay.
    """
