//! What a tier holds, for people.

use std::sync::Arc;

use kvtier_core::object_key::{KeyShape, ObjectKey};
use kvtier_l2::tier::{Deleted, Tier};
use kvtier_l2::{ErrorKind, L2Error, Listed};

use super::L2;

/// Objects that an adapter is asked for at once. Always the same, so that a page of the adapter can be asked for again.
const SLICE: usize = 1000;

/// Pages of the adapter that one call looks through, where most objects are of other models.
const MAX_SLICES: usize = 100;

/// Position at which a listing continues.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cursor {
    /// Page of the adapter; `None` is the first one.
    pub position: Option<String>,
    /// The last object of that page that was looked at.
    pub after: Option<String>,
}

/// A part of a listing.
#[derive(Debug, Default)]
pub struct Listing {
    /// Objects of the part.
    pub objects: Vec<Listed>,
    /// Start of the next part; `None` at the end.
    pub next: Option<Cursor>,
}

impl L2 {
    /// The tiers, in the order in which they are asked.
    pub fn tiers(&self) -> &[Arc<Tier>] {
        &self.tiers
    }

    /// At most `most` objects of a tier, of one model or of all.
    ///
    /// # Errors
    /// As the adapter's; [`ErrorKind::Refused`] for an invalid cursor.
    pub async fn list(
        &self,
        tier: usize,
        from: Cursor,
        model: Option<String>,
        most: usize,
    ) -> Result<Listing, L2Error> {
        let tier = Arc::clone(&self.tiers[tier]);
        let task = async move { list(&tier, from, model.as_deref(), most).await };
        // Where adapters live.
        self.handle
            .spawn(task)
            .await
            .unwrap_or_else(|error| Err(lost(error)))
    }

    /// Deletes objects of a tier; one result each. What waits to be stored there is not stored, and what is being stored is
    /// deleted once its writes have ended. With `force` also what is being read there. Continues if the caller stops waiting.
    ///
    /// # Errors
    /// When the task fails as a whole: one line.
    pub async fn delete(
        &self,
        tier: usize,
        keys: Vec<ObjectKey>,
        force: bool,
    ) -> Result<Vec<Result<Deleted, L2Error>>, L2Error> {
        self.pending.revoke(tier, &keys, force);
        let tier = Arc::clone(&self.tiers[tier]);
        let task = async move { tier.delete(keys, force).await };
        // Where adapters live.
        self.handle.spawn(task).await.map_err(lost)
    }
}

fn lost(error: tokio::task::JoinError) -> L2Error {
    L2Error::new(ErrorKind::Unavailable, error.to_string())
}

async fn list(
    tier: &Tier,
    from: Cursor,
    model: Option<&str>,
    most: usize,
) -> Result<Listing, L2Error> {
    let mut objects = Vec::new();
    let Cursor {
        mut position,
        mut after,
    } = from;
    for _ in 0..MAX_SLICES {
        let page = tier.list(position.clone(), SLICE).await?;
        let name = |listed: &Listed| listed.key.text().name(KeyShape::Grouped);
        let seen = after.as_ref().and_then(|after| {
            let mut listed = page.objects.iter();
            listed.position(|listed| name(listed) == *after)
        });
        for listed in page
            .objects
            .into_iter()
            .skip(seen.map_or(0, |seen| seen + 1))
        {
            if objects.len() == most {
                let next = Some(Cursor { position, after });
                return Ok(Listing { objects, next });
            }
            after = Some(name(&listed));
            if model.is_none_or(|model| **listed.key.model_name() == *model) {
                objects.push(listed);
            }
        }
        position = page.next;
        after = None;
        if position.is_none() {
            let next = None;
            return Ok(Listing { objects, next });
        }
    }
    let next = Some(Cursor { position, after });
    Ok(Listing { objects, next })
}
