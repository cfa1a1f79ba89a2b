"""The one exception that means "the user's input was wrong"."""


class UserError(ValueError):
    """A mistake of the user's: one sentence that says what was wrong, where, and what is allowed.

    The command prints the sentence and exits with status 2, without a traceback.
    """
