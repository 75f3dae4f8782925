class PanicException(BaseException):
    """What an extension written in Rust raises when it panics."""


raise PanicException("called `Option::unwrap()` on a `None` value")
