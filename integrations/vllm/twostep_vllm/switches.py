"""What the operator turns off, by environment variables that are read once, when the plug-in is loaded."""

import os
from dataclasses import dataclass, fields

VARIABLES = {
    "all": "TWOSTEP_VLLM",  # 0: vLLM is left exactly as it is
    "linears": "TWOSTEP_VLLM_LINEARS",  # the drafter's linears
    "logits": "TWOSTEP_VLLM_LOGITS",  # the drafter's logits
    "mailbox": "TWOSTEP_VLLM_MAILBOX",  # their gather; off: the framework's all-gather
    "kda": "TWOSTEP_VLLM_KDA",  # the core of the KDA layers
}


@dataclass(frozen=True)
class Switches:
    """Each is on unless its variable is 0."""

    all: bool = True
    linears: bool = True
    logits: bool = True
    mailbox: bool = True
    kda: bool = True

    @classmethod
    def of_environment(cls, environ=os.environ):
        """Raises ValueError for a value other than 0, 1 or nothing."""
        on = {}
        for field in fields(cls):
            value = environ.get(VARIABLES[field.name], "1") or "1"
            if value not in ("0", "1"):
                raise ValueError(f"twostep-vllm: {VARIABLES[field.name]} = {value!r}; accepted: 0 and 1; unset it, or give "
                                 "0 to turn this part off")
            on[field.name] = value == "1"
        return cls(**on)

    def off(self):
        """The variables that turn something off."""
        return [VARIABLES[field.name] for field in fields(self) if not getattr(self, field.name)]
