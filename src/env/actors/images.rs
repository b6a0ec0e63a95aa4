//! What the actors of tasks start from: what stands in for all images, a task's own image, or what its `Dockerfile`
//! builds.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::actor::image::{Built, ImageBuilder, Recipe};
use crate::actor::{ActorError, RootFs};
use crate::task::harbor::{HarborPart, HarborTask};

/// What a task says that an actor starts from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Source {
    /// An image that should be there.
    pub(super) image: Option<String>,
    /// A folder with a `Dockerfile`, which says how it is built.
    pub(super) context: Option<PathBuf>,
}

impl Source {
    /// Returns what the agent of a Harbor task starts from.
    pub(super) fn of_agent(task: &HarborTask) -> Self {
        Self {
            image: task.config.environment.docker_image.clone(),
            context: with_recipe(task.folder.join("environment")),
        }
    }

    /// Returns what a separate verifier starts from: its own image, or one that is built of its tests; otherwise what
    /// the agent starts from.
    pub(super) fn of_verifier(task: &HarborTask, part: &HarborPart) -> Self {
        let step = part.step.as_ref();
        let of_step = step.map(|step| task.folder.join("steps").join(&step.name).join("tests"));
        let mut places = of_step.into_iter().chain([task.folder.join("tests")]);
        let given = step
            .and_then(|step| step.verifier.environment.as_ref())
            .or(task.config.verifier.environment.as_ref());
        let own = Self {
            image: given.and_then(|environment| environment.docker_image.clone()),
            context: places.find_map(with_recipe),
        };
        match own.image.is_none() && own.context.is_none() {
            true => Self::of_agent(task),
            false => own,
        }
    }
}

/// Returns the folder if it has a `Dockerfile`.
fn with_recipe(folder: PathBuf) -> Option<PathBuf> {
    Recipe::is_in(&folder).then_some(folder)
}

/// What the tasks of a run start from.
#[derive(Debug)]
pub(super) struct Images {
    /// What stands in for all.
    stand_in: Option<RootFs>,
    builder: Option<Arc<dyn ImageBuilder>>,
    /// What is there. It stays so for the run, whatever becomes of a task's files.
    there: Mutex<HashMap<Source, Built>>,
}

impl Images {
    pub(super) fn new(stand_in: Option<RootFs>, builder: Option<Arc<dyn ImageBuilder>>) -> Self {
        Self {
            stand_in,
            builder,
            there: Mutex::default(),
        }
    }

    /// Returns what stands in for the images of all tasks.
    pub(super) fn stand_in(&self) -> Option<&RootFs> {
        self.stand_in.as_ref()
    }

    /// Checks that a task can be given what it starts from; nothing is built.
    ///
    /// # Errors
    ///
    /// Fails with what it needs, and what helps.
    pub(super) fn check(&self, task: &str, source: &Source) -> Result<(), ActorError> {
        let invalid = |reason: String| Err(ActorError::InvalidSpec { reason });
        if self.stand_in.is_some() {
            return Ok(());
        }
        match (&source.image, &source.context, &self.builder) {
            (None, None, _) => invalid(format!(
                "`{task}` names no image and has no `environment/Dockerfile`; give `actor.root`, or \
                 `actor.image` in a cluster, which stands in for it"
            )),
            (None, Some(_), None) => invalid(format!(
                "`{task}` names no image, and nothing builds its `Dockerfile`; give `actor.image_build`, by which \
                 it is built, or `actor.root`, or `actor.image` in a cluster, which stands in for it"
            )),
            (_, Some(context), Some(builder)) => {
                let read = read(context, &**builder);
                read.map_err(|error| named(task, error)).map(|_| ())
            }
            (Some(_), ..) => Ok(()),
        }
    }

    /// Returns what a task starts from, which is built where it is not there.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::check`] does, and where it cannot be built. That is our fault: no policy has a part in it.
    pub(super) fn get(&self, task: &str, source: &Source) -> Result<Built, ActorError> {
        if let Some(root) = &self.stand_in {
            return Ok(root.clone().into());
        }
        let there = || self.there.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(built) = there().get(source) {
            return Ok(built.clone());
        }
        self.check(task, source)?;
        let built = match (&self.builder, &source.image) {
            (None, Some(image)) => RootFs::Image(image.clone()).into(),
            (Some(builder), image) => {
                let recipe = (source.context.as_deref())
                    .map(|context| read(context, &**builder))
                    .transpose()?;
                let built = match (image, &recipe) {
                    (Some(image), recipe) => builder.image(image, recipe.as_ref()),
                    (None, Some(recipe)) => builder.build(recipe),
                    (None, None) => return Err(nothing_of(task)),
                };
                built.map_err(|error| named(task, error))?
            }
            (None, None) => return Err(nothing_of(task)),
        };
        there().insert(source.clone(), built.clone());
        Ok(built)
    }

    /// Ends what is being built.
    pub(super) fn shut_down(&self) {
        if let Some(builder) = &self.builder {
            builder.shut_down();
        }
    }
}

fn read(context: &Path, builder: &dyn ImageBuilder) -> Result<Recipe, ActorError> {
    Recipe::read(context, builder.max_context())
}

fn nothing_of(task: &str) -> ActorError {
    ActorError::InvalidSpec {
        reason: format!("nothing says what `{task}` starts from"),
    }
}

/// Names the task in an error that has to do with it alone.
fn named(task: &str, error: ActorError) -> ActorError {
    match error {
        ActorError::InvalidSpec { reason } => ActorError::InvalidSpec {
            reason: format!("`{task}`: {reason}"),
        },
        ActorError::Backend { activity, message } => ActorError::Backend {
            activity: format!("{activity} for `{task}`"),
            message,
        },
        other => other,
    }
}
