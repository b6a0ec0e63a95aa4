//! Which of the processes this one is, by its environment.

use std::fmt;
use std::net::IpAddr;

use super::CollectiveError;

/// The port that torch's launchers take, too.
const DEFAULT_PORT: u16 = 29_500;

/// More processes than one root should serve.
const MAX_WORLD_SIZE: usize = 1024;

/// The secret of a group of processes. It is not shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Returns the secret as a key for proofs that one knows it.
    pub(super) fn key(&self) -> [u8; 32] {
        blake3::derive_key("wardian collective token v1", self.0.as_bytes())
    }
}

impl From<&str> for Token {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// One of several processes that were launched to work together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Which one it is, from 0.
    pub rank: usize,
    /// How many there are.
    pub world_size: usize,
    /// Which one of its machine it is, from 0: the GPU that it takes.
    pub local_rank: usize,
    /// Name or address of the machine of rank 0.
    pub host: String,
    /// The port that rank 0 listens at.
    pub port: u16,
    /// What all know and nobody else does.
    pub token: Token,
}

impl Launch {
    /// Reads the environment: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`, as
    /// torch's launchers set them, `JOB_COMPLETION_INDEX` of a Kubernetes Indexed Job in place of
    /// `RANK`, and `WARDIAN_CLUSTER_TOKEN`. None is one process by itself.
    ///
    /// # Errors
    ///
    /// Fails where a variable is missing or makes no sense.
    pub fn from_env() -> Result<Option<Self>, CollectiveError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads what `variable` returns for the names of [`Launch::from_env`].
    ///
    /// # Errors
    ///
    /// As for [`Launch::from_env`].
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, CollectiveError> {
        let number = |name: &'static str| match variable(name) {
            None => Ok(None),
            Some(text) => match text.parse::<usize>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => wrong(name, format!("is `{text}`, expected a number from 0 up")),
            },
        };
        let Some(world_size) = number("WORLD_SIZE")? else {
            return Ok(None);
        };
        if !(1..=MAX_WORLD_SIZE).contains(&world_size) {
            let reason = format!("is {world_size}, expected 1 to {MAX_WORLD_SIZE}");
            return wrong("WORLD_SIZE", reason);
        }
        if world_size == 1 {
            return Ok(None);
        }
        let rank = match number("RANK")? {
            Some(rank) => rank,
            None => match number("JOB_COMPLETION_INDEX")? {
                Some(index) => index,
                None => return wrong("RANK", "is not set, though `WORLD_SIZE` is".to_owned()),
            },
        };
        if rank >= world_size {
            return wrong(
                "RANK",
                format!("is {rank}, expected less than {world_size}"),
            );
        }
        let Some(host) = variable("MASTER_ADDR").filter(|host| !host.is_empty()) else {
            let reason = "is not set; give the machine of rank 0, `localhost` if it is this one";
            return wrong("MASTER_ADDR", reason.to_owned());
        };
        let port = number("MASTER_PORT")?.unwrap_or_else(|| DEFAULT_PORT.into());
        let Some(port) = u16::try_from(port).ok().filter(|port| *port > 0) else {
            return wrong("MASTER_PORT", format!("is {port}, expected 1 to 65535"));
        };
        let token = variable("WARDIAN_CLUSTER_TOKEN").filter(|token| !token.is_empty());
        let launch = Self {
            rank,
            world_size,
            local_rank: number("LOCAL_RANK")?.unwrap_or(0),
            host,
            port,
            token: Token(token.clone().unwrap_or_default()),
        };
        if token.is_none() && !launch.is_local() {
            let reason = "is not set; give all processes the same secret, as others can reach \
                          `MASTER_ADDR`, too";
            return wrong("WARDIAN_CLUSTER_TOKEN", reason.to_owned());
        }
        Ok(Some(launch))
    }

    /// Returns whether only this machine's processes can reach rank 0.
    pub(super) fn is_local(&self) -> bool {
        let address = self.host.parse::<IpAddr>();
        self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    pub(super) fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

fn wrong<T>(variable: &'static str, reason: String) -> Result<T, CollectiveError> {
    Err(CollectiveError::Launch { variable, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Launch>, CollectiveError> {
        Launch::from_variables(|name| {
            let found = variables.iter().find(|(found, _)| *found == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_process_by_itself_needs_no_variable() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("WORLD_SIZE", "1"), ("RANK", "0")]).unwrap(), None);
    }

    #[test]
    fn launchers_say_which_process_it_is() {
        let torch = [
            ("WORLD_SIZE", "4"),
            ("RANK", "3"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1234"),
        ];
        let launch = read(&torch).unwrap().unwrap();
        assert_eq!(
            (launch.rank, launch.world_size, launch.local_rank),
            (3, 4, 1)
        );
        assert_eq!(launch.address(), "127.0.0.1:1234");
        let kubernetes = [
            ("WORLD_SIZE", "2"),
            ("JOB_COMPLETION_INDEX", "1"),
            ("MASTER_ADDR", "train-0.train"),
            ("WARDIAN_CLUSTER_TOKEN", "secret"),
        ];
        let launch = read(&kubernetes).unwrap().unwrap();
        assert_eq!((launch.rank, launch.local_rank), (1, 0));
        assert_eq!(launch.address(), "train-0.train:29500");
        assert!(!format!("{launch:?}").contains("secret"));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let sound = [
            ("WORLD_SIZE", "2"),
            ("RANK", "0"),
            ("MASTER_ADDR", "localhost"),
        ];
        read(&sound).unwrap();
        for (name, value) in [
            ("WORLD_SIZE", "two"),
            ("WORLD_SIZE", "0"),
            ("RANK", "2"),
            ("RANK", "-1"),
            ("MASTER_ADDR", ""),
            ("MASTER_PORT", "65536"),
            ("MASTER_PORT", "0"),
            ("LOCAL_RANK", "x"),
        ] {
            let changed: Vec<_> = std::iter::once((name, value)).chain(sound).collect();
            let error = read(&changed).unwrap_err();
            assert!(error.to_string().contains(name), "{name}={value}: {error}");
            assert!(error.is_usage());
        }
        // A port that others can reach wants a secret.
        let error = read(&[
            ("WORLD_SIZE", "2"),
            ("RANK", "0"),
            ("MASTER_ADDR", "10.0.0.1"),
        ]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("WARDIAN_CLUSTER_TOKEN"), "{error}");
    }
}
