"""Addresses and interfaces of this host."""

import ipaddress
import socket

import psutil

from longhelix.errors import UserError


def resolved(name: str) -> str:
    """Return the IPv4 address of a host. Raises UserError if the name is unknown."""
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"the host {name!r} has no IPv4 address ({error}): correct --master-addr") from error


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def address_towards(other: str) -> str:
    """Return the address of this host from which packets to another host leave. Raises UserError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((other, 9))
        except OSError as error:
            raise UserError(
                f"this host has no route to {other} ({error.strerror}): correct --master-addr, or the network"
            ) from error
        return probe.getsockname()[0]


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface. Raises UserError if there is no such interface or address."""
    found = psutil.net_if_addrs()
    if interface not in found:
        raise UserError(f"this host has no interface {interface!r}: set --interface to one of {', '.join(found)}")
    for each in found[interface]:
        if each.family == socket.AF_INET:
            return each.address
    raise UserError(f"the interface {interface} has no IPv4 address: set --interface to another one")


def interface_of(address: str) -> str:
    """Return the interface that has an address of this host."""
    for interface, found in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in found):
            return interface
    raise UserError(
        f"no interface of this host has the address {address}: correct --master-addr or --interface, or if this is not "
        "host 0, --node-rank"
    )
