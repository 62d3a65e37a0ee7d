"""The one exception of twostep."""


class Error(Exception):
    """What twostep refuses or cannot do. str() is "place: argument = value; accepted: range; remedy".

    code is a word: invalid_argument, unsupported, bad_layout, overlap, wrong_device, weight_changed, capturing,
    not_prepared, unavailable, out_of_memory, compile_failed, device_error, peer_lost, data_error, internal.
    """

    def __init__(self, message, code="internal", place="", argument="", value="", accepted="", remedy=""):
        super().__init__(message)
        self.code: str = code
        self.place: str = place
        self.argument: str = argument
        self.value: str = value
        self.accepted: str = accepted
        self.remedy: str = remedy

    def __reduce__(self):
        fields = (self.code, self.place, self.argument, self.value, self.accepted, self.remedy)
        return Error, (str(self), *fields)


def refuse(code, place, argument, value, accepted, remedy=""):
    """Raises an Error made of these fields."""
    message = f"{place}: {argument} = {value}; accepted: {accepted}" + (f"; {remedy}" if remedy else "")
    raise Error(message, code, place, argument, str(value), accepted, remedy)
