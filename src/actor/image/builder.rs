//! What builds images that are not there.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::Recipe;
use crate::actor::{ActorError, RootFs};

/// What actors start from, and what it says of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// The root filesystem.
    pub root: RootFs,
    /// The folder that its programs are meant to start in, where that is known.
    pub workdir: Option<PathBuf>,
    /// The variables that it gives its programs, where the backend does not know of them by itself.
    pub env: BTreeMap<String, String>,
}

impl From<RootFs> for Built {
    fn from(root: RootFs) -> Self {
        Self {
            root,
            workdir: None,
            env: BTreeMap::new(),
        }
    }
}

/// Has images built, each once however many ask for it at the same time. Whatever it fails at is ours, never a
/// policy's doing: recipes come from tasks.
pub trait ImageBuilder: std::fmt::Debug + Send + Sync {
    /// Returns the most bytes that the files of a context may have together.
    fn max_context(&self) -> u64;

    /// Returns what a recipe builds. It is built unless that was done before, in this run or another.
    ///
    /// # Errors
    ///
    /// Fails where the build fails, with the end of its log, and where it takes too long.
    fn build(&self, recipe: &Recipe) -> Result<Built, ActorError>;

    /// Returns what to start from for an image that is named, which has to be there, or is built from `recipe`.
    ///
    /// # Errors
    ///
    /// Fails where it is not there and nothing says how it is built, and as for [`Self::build`].
    fn image(&self, image: &str, recipe: Option<&Recipe>) -> Result<Built, ActorError>;

    /// Ends what is being built; nothing is built any more.
    fn shut_down(&self) {}
}
