"""The host names that requests may use, and the origins whose pages may send requests.  app.py
checks both for each request.

The owner of evil.example can make this name resolve to this machine (DNS rebinding).  A browser
that shows a page of evil.example then treats our responses as evil.example's, and the page can read
them.  Such requests have evil.example in their Host header.  An API key prevents this, because the
page does not know the key.  Without a key, the server accepts only names that nobody else controls:
    addresses, as 127.0.0.1 or [::1]             localhost, and names that end in .localhost
    the names of this machine                    the names in --allow-host, --origin and --host
"""
import contextlib
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from nanoeuler import need, printable, UserError

DEFAULT_PORTS = {"http": 80, "https": 443}


def address_in(name):
    """The IP address if the name is one, otherwise None.  ::ffff:127.0.0.1 becomes 127.0.0.1."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name)
        return getattr(address, "ipv4_mapped", None) or address
    return None


def plain(name):
    """A host name in the form used for comparisons: lower case, without a final dot"""
    return name.lower().removesuffix(".")


def is_loopback(name):
    """Whether a host name always means this machine: 127.0.0.0/8, ::1, localhost, *.localhost"""
    if address := address_in(name):
        return address.is_loopback
    return plain(name) == "localhost" or plain(name).endswith(".localhost")


def origin_in(text):
    """An origin as browsers send it: scheme://host, and :port unless it is the scheme's default"""
    with contextlib.suppress(ValueError):                # a bad port or bad brackets
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        bare = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in text)
        if bare and host and text.isascii() and re.fullmatch(r"[\w.:-]+", host):
            host = f"[{host}]" if ":" in host else host
            named = port is not None and port != DEFAULT_PORTS.get(parts.scheme)
            return f"{parts.scheme}://{host}" + (f":{port}" if named else "")
    raise UserError(f"--origin is {printable(text)!r}, expected scheme://host or "
                    f"scheme://host:port, such as https://example.org")


def host_in(text):
    need(re.fullmatch(r"[\w.-]+", text, re.ASCII),
         f"--allow-host is {printable(text)!r}, expected a host name such as mybox.example.org")
    return plain(text)


class Names:
    """The allowed hosts and origins.
    options: verb.Serving.  Raises a UserError if one of its names is malformed."""

    def __init__(self, options):
        self.origins = {origin_in(text) for text in options.origin}
        self.any = bool(options.api_key)
        own = plain(socket.gethostname())
        self.hosts = {own, f"{own}.local", plain(options.host), *map(host_in, options.allow_host),
                      *(plain(urlsplit(origin).hostname) for origin in self.origins)}

    def allowed_origin(self, origin):
        """The origin of a request if --origin allows it, otherwise None"""
        return origin if origin in self.origins else None

    def allows_host(self, host):
        """Whether requests with this Host header are accepted.  A request without the header is not
        from a browser, and only browsers need this protection."""
        if self.any or not host:
            return True
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return bool(address_in(name) or is_loopback(name) or plain(name) in self.hosts)
        return False
