"""The one error type raised for input that JetSpec cannot honour."""


class JetSpecError(ValueError):
    """A request, checkpoint or model that cannot be honoured; the message names the field and the fix."""
