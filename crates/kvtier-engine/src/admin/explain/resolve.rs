//! Engine that a question means: its model's full name, ranks, chunk size and layouts.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;

use kvtier_core::object_key::check_cache_salt;
use kvtier_core::{GroupRow, Namespace};
use kvtier_observe::api::ExplainRequest;

use super::super::super::context::{Context, check_name};
use super::super::super::instances;
use super::super::super::lookups;
use super::{ExplainError, ExplainedPlace, KeyScope, MAX_TOKENS, TenantView};

/// Values that an error names at most.
const MAX_ALLOWED: usize = 16;

/// The reason of a lookup whose model has no worker.
pub(super) const NO_WORKER: &str = "no_gpu_context";

/// What a question is about.
pub(super) struct Subject {
    pub(super) scope: KeyScope,
    /// The model's name before its `#`.
    pub(super) plain_name: String,
    /// The full names that begin with the name asked for.
    pub(super) names: BTreeSet<Arc<str>>,
    pub(super) chunk_size: NonZeroUsize,
    /// Chunk sizes of other workers of these names.
    pub(super) other_sizes: BTreeSet<NonZeroUsize>,
    /// The rows of a lookup; without a worker, of what is stored.
    pub(super) rows: Arc<[GroupRow]>,
    /// Why a lookup would look for nothing.
    pub(super) refused: Option<&'static str>,
    /// Whether there is no worker, and L1 has objects that workers of this scope have stored.
    pub(super) has_left: bool,
    /// The namespaces with objects that the caller may see, by the number of their place.
    pub(super) known: Vec<(usize, Arc<Namespace>)>,
}

/// Whether a full name begins with this one.
pub(super) fn is_named(full: &str, asked: &str) -> bool {
    let rest = full.strip_prefix(asked);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('#'))
}

/// Workers of the engine that stored a namespace's objects.
pub(super) fn world_size(namespace: &Namespace) -> u32 {
    u32::try_from(namespace.kv_rank() >> 24).unwrap_or(u32::MAX)
}

/// Whether objects of this namespace are a worker's of this scope.
fn is_in(namespace: &Namespace, scope: &KeyScope) -> bool {
    namespace.model_name() == scope.model_name()
        && namespace.cache_salt() == scope.cache_salt()
        && scope.kv_ranks().any(|rank| rank == namespace.kv_rank())
}

impl Subject {
    pub(super) fn resolve(
        context: &Context,
        request: &ExplainRequest,
        view: TenantView,
        places: &[ExplainedPlace<'_>],
    ) -> Result<Self, ExplainError> {
        let asked = &request.model_name;
        if request.token_ids.len() > MAX_TOKENS {
            return Err(ExplainError::TooManyTokens(request.token_ids.len()));
        }
        check_name("model_name", asked).map_err(ExplainError::Name)?;
        let salt = request.cache_salt.as_deref().unwrap_or_default();
        check_cache_salt(salt)?;
        let salt = match view {
            TenantView::One => context.salts.of_reader(salt),
            TenantView::All => Ok(context.salts.of_operator(salt)),
        };
        let salt = salt.map_err(ExplainError::Name)?;
        let sees =
            |namespace: &Namespace| view == TenantView::All || **namespace.cache_salt() == *salt;
        let places = places.iter().enumerate();
        let known = places.flat_map(|(at, place)| {
            let all = place.namespaces(sees).into_iter();
            all.map(move |namespace| (at, namespace))
        });
        let known: Vec<_> = known.collect();
        let workers = context.instances.all();
        let of_workers = || {
            let all = workers.iter();
            all.filter(|it| is_named(&it.model_name, asked))
        };
        let stored = || {
            let all = known.iter().map(|(_, it)| it);
            all.filter(|it| **it.cache_salt() == *salt && is_named(it.model_name(), asked))
        };
        let registered: BTreeSet<_> = of_workers().map(|it| Arc::clone(&it.model_name)).collect();
        let names: BTreeSet<_> = stored().map(|it| Arc::clone(it.model_name())).collect();
        let models = either(&registered, &names);
        // A full name is also the beginning of others.
        let exact = models.get(asked.as_str()).cloned();
        let model = one_of("model_name", request, exact, models)?;
        let model = model.unwrap_or_else(|| asked.as_str().into());
        let registered_sizes: BTreeSet<_> = of_workers()
            .filter(|it| it.model_name == model)
            .map(|it| it.world_size)
            .collect();
        let of_model = stored().filter(|it| *it.model_name() == model);
        let stored_sizes = of_model.map(|it| world_size(it)).collect();
        let world_size = match request.world_size {
            Some(asked) => asked,
            None => {
                let sizes = either(&registered_sizes, &stored_sizes);
                one_of("world_size", request, None, sizes)?.unwrap_or(1)
            }
        };
        let scope = KeyScope::new(&model, &salt, world_size, None)?;
        let sizes = context.instances.chunk_sizes(&model, world_size);
        let chunk_size = if sizes.is_empty() {
            request.chunk_size
        } else {
            one_of("chunk_size", request, request.chunk_size, &sizes)?
        };
        let chunk_size = match chunk_size {
            None => context.chunk_size,
            Some(size) => size_of(size).ok_or_else(|| ExplainError::Choice {
                field: "chunk_size",
                asked: Some(size.to_string()),
                model_name: asked.clone(),
                allowed: vec!["at least 1".into()],
            })?,
        };
        let mut other_sizes: BTreeSet<_> = of_workers()
            .filter_map(|it| size_of(it.layout.chunk_tokens))
            .chain([context.chunk_size])
            .collect();
        other_sizes.remove(&chunk_size);
        let served = context
            .instances
            .of_workers(&model, world_size, scope.workers(), chunk_size);
        let (rows, refused) = match served {
            Some(served) => {
                let refused = lookups::unserved(&served).map(|unserved| unserved.name());
                (instances::rows(&scope, &served), refused)
            }
            None => (rows_of_stored(&scope, &known), Some(NO_WORKER)),
        };
        let has_left = refused == Some(NO_WORKER)
            && known.iter().any(|(at, it)| *at == 0 && is_in(it, &scope));
        Ok(Self {
            has_left,
            plain_name: asked.split('#').next().unwrap_or_default().to_owned(),
            names: registered.into_iter().chain(names).collect(),
            scope,
            chunk_size,
            other_sizes,
            rows,
            refused,
            known,
        })
    }
}

fn size_of(tokens: u64) -> Option<NonZeroUsize> {
    NonZeroUsize::new(usize::try_from(tokens).ok()?)
}

/// The values that workers have, or else those that stored objects have.
fn either<'a, T>(registered: &'a BTreeSet<T>, stored: &'a BTreeSet<T>) -> &'a BTreeSet<T> {
    if registered.is_empty() {
        stored
    } else {
        registered
    }
}

/// The value asked for, or the only one; `None` without any.
///
/// # Errors
/// There are several, or others than asked for.
fn one_of<T: Clone + Ord + ToString>(
    field: &'static str,
    request: &ExplainRequest,
    asked: Option<T>,
    values: &BTreeSet<T>,
) -> Result<Option<T>, ExplainError> {
    let chosen = match &asked {
        Some(asked) => values.get(asked),
        None => values.first().filter(|_| values.len() == 1),
    };
    if chosen.is_none() && !values.is_empty() {
        let allowed = values.iter().map(ToString::to_string);
        return Err(ExplainError::Choice {
            field,
            asked: asked.map(|asked| asked.to_string()),
            model_name: request.model_name.clone(),
            allowed: allowed.take(MAX_ALLOWED).collect(),
        });
    }
    Ok(chosen.cloned())
}

/// Without a worker the layouts are unknown: those in which L1 has objects, or else none.
fn rows_of_stored(scope: &KeyScope, known: &[(usize, Arc<Namespace>)]) -> Arc<[GroupRow]> {
    let of_scope = known.iter().filter(|(_, it)| is_in(it, scope));
    let mut namespaces: BTreeSet<_> = of_scope.map(|(_, it)| Arc::clone(it)).collect();
    let with_layout: BTreeSet<_> = namespaces
        .iter()
        .filter(|it| it.layout() != 0)
        .map(|it| it.without_layout())
        .collect();
    // Those of the tiers, which L1 has in a layout.
    namespaces.retain(|it| !with_layout.contains(it));
    if namespaces.is_empty() {
        let ranks = scope.kv_ranks();
        namespaces.extend(ranks.map(|rank| scope.namespace(rank, 0, 0)));
    }
    let row = |namespace| GroupRow {
        namespace,
        window: None,
        object_bytes: 0,
    };
    namespaces.into_iter().map(row).collect()
}
