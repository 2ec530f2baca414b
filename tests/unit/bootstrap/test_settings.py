"""The presets: what must hold between their figures, and which way they pull."""

from dataclasses import fields

import pytest

from p2pserve.bootstrap import NetworkSettings, TransportSettings

LAN, WAN = NetworkSettings.lan(), NetworkSettings.wan()


@pytest.mark.parametrize("settings", [LAN, WAN])
def test_the_figures_of_a_preset_fit_together(settings: NetworkSettings) -> None:
    assert settings.ping_s < settings.suspect_s < settings.dead_s < settings.forget_s
    assert 1.5 * settings.ping_s < settings.suspect_s, "the second ping comes before suspicion"
    assert settings.first_backoff_s < settings.named_backoff_s < settings.last_backoff_s
    assert settings.named_backoff_s * 1.25 <= 2.5, "a restarted bootstrap is found within three seconds"
    assert settings.head_start_s < settings.join_s
    assert settings.identity_check_s < settings.greeting_s, "whoever waits for the answer does not hang up before it"
    assert settings.join_retry_s < settings.join_s
    assert 2 * settings.refresh_s < settings.lease_s, "one refreshing may be lost"
    assert settings.settle_s + settings.lease_s <= 2.5, "a hung leader is replaced in that time"
    assert settings.hears_s < settings.redial_s < settings.dead_s < settings.beat_s
    assert settings.rumour_peers >= 2
    assert settings.rumour_s <= settings.rumour_beat_s < settings.beat_s / 5, "a beat is everywhere before the next"


def test_a_local_network_waits_for_nothing_longer_than_a_wide_one() -> None:
    for field in fields(NetworkSettings):
        if field.name.endswith("_s"):
            assert getattr(LAN, field.name) <= getattr(WAN, field.name), field.name


def test_the_wide_preset_is_the_default() -> None:
    assert NetworkSettings() == WAN


def test_a_dial_ends_before_whoever_joins_gives_up() -> None:
    assert TransportSettings().dial_s <= WAN.join_s
