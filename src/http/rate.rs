//! How often a client may ask.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::HeaderValue;
use blake3::Hash;

use super::series;

/// Most clients of a generation, of which two are remembered: seven megabytes.
const MAX_CLIENTS: usize = 1 << 15;

/// A number of requests per time, and how many may come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// The time that a request costs.
    every: Duration,
    /// Requests at once.
    burst: u32,
}

impl FromStr for Rate {
    type Err = String;

    /// Reads `10/s`, `600/m` or `10/s:50`; without a burst it is what comes within the unit.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("expected a rate such as `10/s`, `600/m` or `10/s:50`, not `{text}`");
        let (rate, burst) = match text.split_once(':') {
            Some((rate, burst)) => (rate, Some(burst)),
            None => (text, None),
        };
        let (count, unit) = rate.split_once('/').ok_or_else(wrong)?;
        let unit = match unit {
            "s" => Duration::from_secs(1),
            "m" => Duration::from_mins(1),
            "h" => Duration::from_hours(1),
            _ => return Err(wrong()),
        };
        let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
        let count = number(count)?;
        let burst = burst.map_or(Ok(count), number)?;
        if count == 0 || burst == 0 {
            return Err("a rate of nothing lets nobody in; leave it out for no limit".to_owned());
        }
        Ok(Self {
            every: unit / count,
            burst,
        })
    }
}

/// The address that a request came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// Who asks, for the limit's purposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Client {
    /// Who has this key.
    Key(Hash),
    /// An address, of version 6 its network: a machine has 2^64 of those.
    Peer(IpAddr),
    /// Whoever comes another way than over a connection.
    Unknown,
}

impl Client {
    fn at(peer: IpAddr) -> Self {
        Self::Peer(match peer.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((u128::from(address) & !u128::from(u64::MAX)).into()),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

/// A limit for each client, as buckets of tokens: `burst` of them, one more each `every`.
///
/// A bucket is the time at which it is full again (the generic cell rate algorithm). It is remembered as
/// long as it may not be full: clients move from the last generation to this one when they ask, and the last
/// is forgotten when this one is as old as a bucket takes to fill, or has [`MAX_CLIENTS`]. So a client is
/// never refused for what others do; one of very many may be let in too often.
pub(crate) struct RateLimit {
    rate: Rate,
    started: Instant,
    table: Mutex<Table>,
    refused: AtomicU64,
}

#[derive(Default)]
struct Table {
    /// When this generation began.
    since: Duration,
    now: HashMap<Client, Duration>,
    before: HashMap<Client, Duration>,
}

impl fmt::Debug for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("rate", &self.rate)
            .finish_non_exhaustive()
    }
}

impl RateLimit {
    pub(crate) fn new(rate: Rate) -> Self {
        Self {
            rate,
            started: Instant::now(),
            table: Mutex::default(),
            refused: AtomicU64::new(0),
        }
    }

    /// Takes a token of the client that a request is from. `key` is the hash of a key that *is good*: of those
    /// that are made up each would be another client.
    ///
    /// # Errors
    ///
    /// Fails with the time until there is one.
    pub(crate) fn admit(&self, key: Option<Hash>, request: &Request) -> Result<(), Duration> {
        let client = match (key, request.extensions().get::<Peer>()) {
            (Some(key), _) => Client::Key(key),
            (None, Some(Peer(address))) => Client::at(*address),
            (None, None) => Client::Unknown,
        };
        self.admit_at(client, self.started.elapsed())
    }

    fn admit_at(&self, client: Client, now: Duration) -> Result<(), Duration> {
        let Rate { every, burst } = self.rate;
        let fills_within = every * burst;
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.now.len() >= MAX_CLIENTS || now.saturating_sub(table.since) >= fills_within {
            table.before = std::mem::take(&mut table.now);
            table.since = now;
        }
        let known = table.now.get(&client).or_else(|| table.before.get(&client));
        let full_at = known.map_or(now, |at| *at).max(now) + every;
        let wait = full_at.saturating_sub(now + fills_within);
        if wait > Duration::ZERO {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(wait);
        }
        table.now.insert(client, full_at);
        Ok(())
    }

    /// Writes what was refused, as Prometheus asks for it.
    pub(crate) fn write(&self, text: &mut String) {
        let name = "http_rate_limited_total";
        let help = "Requests refused because their client asked too often";
        let refused = self.refused.load(Ordering::Relaxed) as f64;
        series(text, name, "counter", help, refused);
    }
}

/// Returns the time as `Retry-After` has it: whole seconds, none too few.
pub(crate) fn retry_after(wait: Duration) -> HeaderValue {
    HeaderValue::from(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn limit(rate: &str) -> RateLimit {
        RateLimit::new(rate.parse().unwrap())
    }

    fn peer(number: u32) -> Client {
        Client::at(IpAddr::V4(Ipv4Addr::from(number)))
    }

    #[test]
    fn rates_are_read() {
        let rate = |text: &str| text.parse::<Rate>().map(|rate| (rate.every, rate.burst));
        assert_eq!(rate("10/s"), Ok((Duration::from_millis(100), 10)));
        assert_eq!(rate("30/m:5"), Ok((Duration::from_secs(2), 5)));
        assert_eq!(rate("1/h"), Ok((Duration::from_hours(1), 1)));
        for wrong in [
            "",
            "10",
            "10/d",
            "0/s",
            "5/s:0",
            "-1/s",
            "1.5/s",
            "5/s:",
            "99999999999/s",
        ] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_client_has_its_burst_and_then_its_rate() {
        let limit = limit("2/s:3");
        let ms = Duration::from_millis;
        let admit = |client, at| limit.admit_at(peer(client), ms(at));
        for _ in 0..3 {
            assert_eq!(admit(1, 0), Ok(()));
        }
        assert_eq!(admit(1, 0), Err(ms(500)));
        assert_eq!(admit(1, 499), Err(ms(1)));
        assert_eq!(admit(2, 499), Ok(()), "another's requests do not count");
        assert_eq!(admit(1, 500), Ok(()));
        assert_eq!(admit(1, 500), Err(ms(500)), "what was refused cost nothing");
        // It fills up to the burst and no further.
        for _ in 0..3 {
            assert_eq!(admit(1, 60_000), Ok(()));
        }
        assert_eq!(admit(1, 60_000), Err(ms(500)));
        let mut text = String::new();
        limit.write(&mut text);
        assert!(text.contains("http_rate_limited_total 4\n"), "{text}");
    }

    /// At any rate of asking, and over any number of generations.
    #[test]
    fn nobody_gets_more_than_the_rate() {
        let limit = limit("10/s:5");
        let mut admitted = 0;
        for at in 0..20_000 {
            let at = Duration::from_millis(at);
            admitted += u32::from(limit.admit_at(peer(1), at).is_ok());
        }
        assert_eq!(admitted, 5 + 199);
    }

    #[test]
    fn a_million_addresses_take_no_more_memory_and_refuse_nobody() {
        let limit = limit("1/m:2");
        let at = Duration::from_secs;
        assert_eq!(limit.admit_at(Client::Unknown, at(0)), Ok(()));
        for number in 0..1_000_000 {
            assert_eq!(limit.admit_at(peer(number), at(1)), Ok(()));
        }
        {
            let table = limit.table.lock().unwrap();
            assert!(table.now.len() + table.before.len() <= 2 * MAX_CLIENTS);
        }
        assert_eq!(limit.admit_at(Client::Unknown, at(1)), Ok(()));
        // Those of the last are still known.
        let last = peer(999_999);
        assert_eq!(limit.admit_at(last, at(1)), Ok(()));
        assert!(limit.admit_at(last, at(1)).is_err());
    }

    #[test]
    fn a_network_of_version_6_is_one_client() {
        let at = |text: &str| Client::at(text.parse().unwrap());
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff:2"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
        assert_ne!(at("10.0.0.2"), at("10.0.0.1"));
    }

    #[test]
    fn a_wait_is_rounded_up() {
        assert_eq!(retry_after(Duration::from_millis(1)), "1");
        assert_eq!(retry_after(Duration::from_secs(2)), "2");
        assert_eq!(retry_after(Duration::from_millis(2001)), "3");
    }
}
