//! What the agent relies on in an API server, met by the fake one and by a real one (`make envtest`); and what only
//! a server with faults can show.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]

#[path = "api_contract/contract.rs"]
mod contract;
#[path = "api_contract/faults.rs"]
mod faults;
#[path = "api_contract/world.rs"]
mod world;

/// The contract, with a world for each of its clauses.
macro_rules! meets_the_contract {
    ($(#[$test:meta])* $server:ident $world:expr) => {
        mod $server {
            meets_the_contract! { @clauses [$(#[$test])*] $world;
                pod_gets_its_defaults
                names_are_unique_and_may_be_generated
                status_patch_merges_conditions_by_type
                order_of_a_merged_list_is_that_of_the_patch
                status_and_spec_are_written_apart
                write_that_changes_nothing_is_none
                end_that_is_final_is_not_taken_back
                other_uid_is_refused
                update_needs_the_newest_version
                pod_on_a_node_is_deleted_gracefully
                pod_that_runs_nowhere_is_deleted_at_once
                finalizer_holds_a_deleted_pod
                watch_tells_what_enters_and_leaves_its_selection
                watch_ends_after_its_timeout_with_a_bookmark
                list_in_pages_is_of_one_moment
                node_object_is_patched_by_its_node
                node_with_a_swap_of_nothing_is_not_kept
                node_touches_nothing_of_other_nodes
                node_reads_only_what_its_pods_refer_to
                node_creates_only_mirror_pods_of_its_own
                lease_is_updated_with_its_version
                token_is_bound_to_a_pod_of_the_node
            }
        }
    };
    (@clauses $test:tt $world:expr; $($name:ident)*) => {
        $(meets_the_contract! { @clause $test $world; $name })*
    };
    (@clause [$(#[$test:meta])*] $world:expr; $name:ident) => {
        $(#[$test])*
        async fn $name() {
            super::contract::$name(&$world.await).await;
        }
    };
}

meets_the_contract! { #[tokio::test(start_paused = true)] fake super::world::World::fake() }
meets_the_contract! { #[tokio::test] real super::world::World::real() }
