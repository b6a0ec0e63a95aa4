//! What is made of files, and made anew when they change.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::files::Contents;
use super::{Credentials, TlsError, TlsFiles};
use crate::causes::with_causes;

/// How often the files are looked at, at most. Reading a few kilobytes takes some microseconds.
const CHECK_EVERY: Duration = Duration::from_secs(1);

type Make<T> = Box<dyn Fn(&Credentials) -> Result<T, TlsError> + Send + Sync>;

/// What is made of files.
///
/// The files are compared by what they hold: whether they are written over, renamed or behind a link that
/// is turned, as those of Kubernetes' volumes, makes no difference. A state that cannot be used, such as a
/// new certificate whose key is still to come, is warned of once, and what there was stays.
pub(crate) struct Reloading<T> {
    files: TlsFiles,
    make: Make<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    current: Arc<T>,
    /// The digest of what was read last, whether it could be used or not.
    seen: blake3::Hash,
    checked: Instant,
}

impl<T> fmt::Debug for Reloading<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloading")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl<T> Reloading<T> {
    /// Makes it a first time.
    ///
    /// # Errors
    ///
    /// Fails where the files cannot be used.
    pub(crate) fn new(
        files: TlsFiles,
        make: impl Fn(&Credentials) -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let contents = files.read()?;
        let current = Arc::new(make(&files.parse(&contents)?)?);
        Ok(Self {
            files,
            make: Box::new(make),
            state: Mutex::new(State {
                current,
                seen: contents.digest(),
                checked: Instant::now(),
            }),
        })
    }

    /// Returns what the files make, as of the last second.
    pub(crate) fn current(&self) -> Arc<T> {
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = {
            let mut state = lock();
            if state.checked.elapsed() < CHECK_EVERY {
                return Arc::clone(&state.current);
            }
            state.checked = Instant::now();
            state.seen
        };
        // Others go on with what there is.
        let read = self.files.read();
        let now = match &read {
            Ok(contents) => contents.digest(),
            Err(error) => blake3::hash(with_causes(error).as_bytes()),
        };
        if now != seen {
            let made = read.and_then(|contents| self.make(&contents));
            let mut state = lock();
            state.seen = now;
            match made {
                Ok(made) => {
                    tracing::info!(files = ?self.files, "certificates were read again");
                    state.current = Arc::new(made);
                }
                Err(error) => tracing::warn!(
                    error = with_causes(&error),
                    "new certificates cannot be used; the old ones stay"
                ),
            }
        }
        Arc::clone(&lock().current)
    }

    fn make(&self, contents: &Contents) -> Result<T, TlsError> {
        (self.make)(&self.files.parse(contents)?)
    }
}
