"""Config files. This one lets Hydra find them as `pkg://composer.conf` (`composer/conf` is a link to here)."""
