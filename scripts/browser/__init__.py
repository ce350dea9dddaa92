"""Python in the reader's browser: what the site's labs and playground load on a click."""
