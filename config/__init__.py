"""What a run is asked to do: the schema, and how files and the command line fill it. Imports nothing heavy."""

from config.errors import ConfigError, UserError, command
from config.load import differences, flatten, given_options, load_config, override, read_toml, split_preset, to_toml
from config.schema import Config, ModelConfig

__all__ = [
    "Config",
    "ConfigError",
    "ModelConfig",
    "UserError",
    "command",
    "differences",
    "flatten",
    "given_options",
    "load_config",
    "override",
    "read_toml",
    "split_preset",
    "to_toml",
]
