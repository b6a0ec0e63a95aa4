//! The way back to where a step began.

use candle_core::Tensor;

use super::super::TrainerError;
use super::super::optim::AdamW;
use super::super::value::ValueHead;
use crate::engine::model::Decoder;

/// Weights and moments as they were before a step of several passes, one of which may be refused.
#[derive(Debug)]
pub(super) struct BeforeStep {
    variables: Vec<Tensor>,
    optimizer: AdamW,
    critic: Option<ValueHead>,
}

impl BeforeStep {
    pub(super) fn remember(
        decoder: &Decoder,
        optimizer: &AdamW,
        critic: Option<&ValueHead>,
    ) -> Result<Self, TrainerError> {
        let copies = decoder.variables().iter().map(|(_, var)| var.copy());
        Ok(Self {
            variables: copies.collect::<candle_core::Result<_>>()?,
            optimizer: optimizer.clone(),
            critic: critic.cloned(),
        })
    }

    /// Sets the decoder back and returns the optimizer and the value head.
    pub(super) fn restore(
        self,
        decoder: &Decoder,
    ) -> Result<(AdamW, Option<ValueHead>), TrainerError> {
        for ((_, var), before) in decoder.variables().iter().zip(&self.variables) {
            var.set(before)?;
        }
        decoder.mark_updated();
        Ok((self.optimizer, self.critic))
    }
}
