"""What can go wrong with the stack. Every message says the cause, what it means and one thing to do."""


class StackError(Exception):
    """PostgreSQL, Kafka or a child process could not do what was asked; the message says why and what to do."""


class PortTakenError(StackError):
    """Another process listens on a port that was asked for."""


class DirectoryInUseError(StackError):
    """Another run uses the directory."""


class StartFailedError(StackError):
    """A process ended or stayed silent before it was ready; the message carries the end of its log."""
