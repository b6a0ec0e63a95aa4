//! Images for actors of a cluster: built there, pushed to its registry and pulled from it.

use std::sync::Arc;

use super::Machine;
use super::images::MAX_CONTEXT;
use crate::actor::image::{Built, ImageBuilder, Recipe};
use crate::actor::{ActorError, RootFs};

/// Has images built in a cluster.
#[derive(Debug)]
pub(super) struct ClusterBuilder {
    machine: Arc<Machine>,
}

impl ClusterBuilder {
    pub(super) fn new(machine: Arc<Machine>) -> Self {
        Self { machine }
    }
}

impl ImageBuilder for ClusterBuilder {
    fn max_context(&self) -> u64 {
        MAX_CONTEXT as u64
    }

    fn build(&self, recipe: &Recipe) -> Result<Built, ActorError> {
        let repository = self.machine.images()?.repository();
        let image = format!("{repository}:{}", recipe.tag());
        self.machine.ensure_image(&image, recipe)?;
        Ok(Built {
            workdir: recipe.workdir(),
            ..Built::from(RootFs::Image(image))
        })
    }

    /// Images of other registries are taken as they are: those answer to whom they like.
    fn image(&self, image: &str, recipe: Option<&Recipe>) -> Result<Built, ActorError> {
        let images = self.machine.images()?;
        let mut workdir = None;
        if images.is_own(image) {
            match recipe {
                Some(recipe) => {
                    self.machine.ensure_image(image, recipe)?;
                    workdir = recipe.workdir();
                }
                None => images.ensure(image, |_| {
                    Err(ActorError::Backend {
                        activity: format!("looking for the image `{image}`"),
                        message: format!(
                            "its registry does not have `{image}`, and nothing says how it is built; push it \
                             there, or give `actor.image`, which stands in for those of all tasks"
                        ),
                    })
                })?,
            }
        }
        Ok(Built {
            workdir,
            ..Built::from(RootFs::Image(image.to_owned()))
        })
    }
}
