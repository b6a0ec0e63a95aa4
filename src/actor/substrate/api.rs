//! What is asked of a control plane, whichever way it is reached.

use std::collections::BTreeMap;

/// The state of an actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ActorState {
    /// It is being started.
    Resuming,
    /// It runs.
    Running,
    /// It is being kept.
    Suspending,
    /// It is kept.
    Suspended,
    /// It is being put aside.
    Pausing,
    /// It is put aside.
    Paused,
    /// It ended by itself, or what it ran on did.
    Crashed,
    /// It is being deleted.
    Deleting,
    /// It is being put back.
    Reverting,
    /// Something that a newer server says.
    Unknown,
}

impl ActorState {
    /// Each but the last, by its number less one.
    const ALL: [(Self, &str); 9] = [
        (Self::Resuming, "RESUMING"),
        (Self::Running, "RUNNING"),
        (Self::Suspending, "SUSPENDING"),
        (Self::Suspended, "SUSPENDED"),
        (Self::Pausing, "PAUSING"),
        (Self::Paused, "PAUSED"),
        (Self::Crashed, "CRASHED"),
        (Self::Deleting, "DELETING"),
        (Self::Reverting, "REVERTING"),
    ];

    /// Reads its number.
    #[must_use]
    pub fn from_number(number: i32) -> Self {
        let found = usize::try_from(number)
            .ok()
            .and_then(|number| Self::ALL.get(number.checked_sub(1)?));
        found.map_or(Self::Unknown, |(state, _)| *state)
    }

    /// Reads its name, with or without what it begins with.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        let bare = name
            .strip_prefix("ACTOR_STATE_")
            .or_else(|| name.strip_prefix("STATUS_"))
            .unwrap_or(name);
        let found = Self::ALL.iter().find(|(_, known)| *known == bare);
        found.map_or(Self::Unknown, |(state, _)| *state)
    }
}

/// An actor as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActorView {
    /// Its name.
    pub name: String,
    /// How it is.
    pub state: ActorState,
    /// Why it crashed, if it did and somebody knows.
    pub crash: Option<String>,
}

/// A tag as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagView {
    /// Its name.
    pub name: String,
    /// Whether actors can start from it.
    pub is_usable: bool,
}

/// A template as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateView {
    /// Its name.
    pub name: String,
    /// Whether its first snapshot is there.
    pub is_ready: bool,
    /// Why it never will be.
    pub error: Option<String>,
}

/// An actor to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewActor {
    /// Its name.
    pub name: String,
    /// Its template.
    pub template: String,
    /// The tag that it starts from, if not from its template.
    pub source_tag: Option<String>,
}

/// A template to be made.
#[derive(Clone, PartialEq, Eq)]
pub struct NewTemplate {
    /// Its name.
    pub name: String,
    /// The image, by digest.
    pub image: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its variables.
    pub env: BTreeMap<String, String>,
    /// The port at which it answers `/readyz`.
    pub port: u16,
    /// An image, by digest, and the folder where it is shown.
    pub volume: Option<(String, String)>,
    /// Where snapshots are kept.
    pub storage_location: String,
    /// The cluster's object that says how its sandboxes are run.
    pub sandbox_config: String,
    /// Labels that its workers must have.
    pub worker_labels: BTreeMap<String, String>,
    /// CPUs, as Kubernetes writes them, if there is a limit.
    pub cpu: Option<String>,
    /// Memory, in bytes.
    pub memory: u64,
}

impl std::fmt::Debug for NewTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Variables hold the token.
        f.debug_struct("NewTemplate")
            .field("name", &self.name)
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

/// What kind of failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApiErrorKind {
    /// There is no such object.
    NotFound,
    /// There is one already.
    Exists,
    /// The object's state does not allow it.
    Precondition,
    /// It cannot be reached, has no room or lost a race; later it may do.
    Unavailable,
    /// Who asks may not.
    Denied,
    /// The server does not know what is asked.
    Unimplemented,
    /// Anything else.
    Other,
}

/// Why something was not done.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{call}: {message}")]
pub struct ApiError {
    /// What was asked for.
    pub call: &'static str,
    /// What kind it is.
    pub kind: ApiErrorKind,
    /// What was said.
    pub message: String,
}

/// A control plane, and one atespace of it. Calls block, for a bounded time.
pub trait SubstrateApi: std::fmt::Debug + Send + Sync {
    /// Makes an actor, which is not started.
    ///
    /// # Errors
    ///
    /// Fails as [`ApiErrorKind`] says, as do all.
    fn create_actor(&self, actor: &NewActor) -> Result<(), ApiError>;

    /// Returns an actor as it is now.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn actor(&self, name: &str) -> Result<ActorView, ApiError>;

    /// Returns all actors.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn actors(&self) -> Result<Vec<ActorView>, ApiError>;

    /// Starts an actor, or does nothing where it runs.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn resume_actor(&self, name: &str) -> Result<(), ApiError>;

    /// Keeps an actor and frees what it ran on.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn suspend_actor(&self, name: &str) -> Result<(), ApiError>;

    /// Deletes an actor, whatever its state is.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn delete_actor(&self, name: &str) -> Result<(), ApiError>;

    /// Lets an actor reach nothing.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn deny_egress(&self, name: &str) -> Result<(), ApiError>;

    /// Gives what a suspended actor was kept as a name.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn create_tag(&self, name: &str, actor: &str) -> Result<(), ApiError>;

    /// Returns all tags.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn tags(&self) -> Result<Vec<TagView>, ApiError>;

    /// Returns a tag as it is now.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn tag(&self, name: &str) -> Result<TagView, ApiError>;

    /// Deletes a tag.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn delete_tag(&self, name: &str) -> Result<(), ApiError>;

    /// Makes a template.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn create_template(&self, template: &NewTemplate) -> Result<(), ApiError>;

    /// Returns all templates.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn templates(&self) -> Result<Vec<TemplateView>, ApiError>;

    /// Returns a template as it is now.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn template(&self, name: &str) -> Result<TemplateView, ApiError>;

    /// Deletes a template.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn delete_template(&self, name: &str) -> Result<(), ApiError>;

    /// Returns the end of what an actor printed, where that can be had.
    ///
    /// # Errors
    ///
    /// See [`ApiErrorKind`].
    fn logs(&self, name: &str) -> Result<String, ApiError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_by_number_and_by_name() {
        assert_eq!(ActorState::from_number(2), ActorState::Running);
        assert_eq!(ActorState::from_number(9), ActorState::Reverting);
        for unknown in [-1, 0, 10, i32::MAX] {
            assert_eq!(ActorState::from_number(unknown), ActorState::Unknown);
        }
        for name in ["ACTOR_STATE_CRASHED", "STATUS_CRASHED", "CRASHED"] {
            assert_eq!(ActorState::from_name(name), ActorState::Crashed);
        }
        assert_eq!(ActorState::from_name("new"), ActorState::Unknown);
    }
}
