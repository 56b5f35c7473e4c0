//! A breadth-first search through every state that a model can come to.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;

/// What can be explored.
pub(super) trait Model {
    type State;
    type Action: Clone + Debug;

    fn initial(&self) -> Self::State;
    /// Everything that can happen next.
    fn actions(&self, state: &Self::State) -> Vec<Self::Action>;
    /// The state after an action, or the property that it breaks.
    fn next(&self, state: &Self::State, action: &Self::Action) -> Result<Self::State, String>;
    /// A hash of everything that decides what can happen from here on.
    fn fingerprint(&self, state: &Self::State) -> u64;
    /// Whether an action happens by itself in the end, whatever else does not.
    fn is_certain(&self, action: &Self::Action) -> bool;
    /// Judges a state in which nothing is certain to happen any more.
    fn at_rest(&self, state: &Self::State) -> Result<(), String>;
}

/// How much was explored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Explored {
    pub(super) states: usize,
    pub(super) transitions: usize,
    pub(super) depth: usize,
    /// States in which nothing is certain to happen any more.
    pub(super) at_rest: usize,
}

/// A broken property with the way that leads to it.
#[derive(Clone, Debug)]
pub(super) struct CounterExample {
    pub(super) property: String,
    pub(super) actions: Vec<String>,
    pub(super) explored: Explored,
}

struct Search<A> {
    /// For each state the one that it was found from, and how.
    parents: Vec<Option<(u32, A)>>,
    depths: Vec<u32>,
    explored: Explored,
}

/// Explores everything, the shortest ways first.
pub(super) fn explore<M: Model>(model: &M) -> Result<Explored, CounterExample> {
    let mut search = Search {
        parents: vec![None],
        depths: vec![0],
        explored: Explored {
            states: 1,
            ..Explored::default()
        },
    };
    let initial = model.initial();
    let mut known = HashMap::from([(model.fingerprint(&initial), 0)]);
    let mut queue = VecDeque::from([(0, initial)]);
    let mut certain = Vec::new();
    while let Some((from, state)) = queue.pop_front() {
        let mut rests = true;
        for action in model.actions(&state) {
            search.explored.transitions += 1;
            let next = match model.next(&state, &action) {
                Ok(next) => next,
                Err(property) => return Err(search.counter_example(from, Some(&action), property)),
            };
            let fresh = u32::try_from(search.parents.len()).expect("fewer states");
            let to = *known.entry(model.fingerprint(&next)).or_insert(fresh);
            if model.is_certain(&action) {
                rests = false;
                certain.push((from, to));
            }
            if to == fresh {
                let depth = search.depths[from as usize] + 1;
                search.explored.states += 1;
                search.explored.depth = search.explored.depth.max(depth as usize);
                search.parents.push(Some((from, action)));
                search.depths.push(depth);
                queue.push_back((to, next));
            }
        }
        if rests {
            search.explored.at_rest += 1;
            if let Err(property) = model.at_rest(&state) {
                return Err(search.counter_example(from, None, property));
            }
        }
    }
    match on_a_circle(search.parents.len(), &certain) {
        None => Ok(search.explored),
        Some(state) => Err(search.counter_example(state, None, "goes round in circles".to_owned())),
    }
}

impl<A: Debug> Search<A> {
    fn counter_example(&self, at: u32, last: Option<&A>, property: String) -> CounterExample {
        let mut actions: Vec<String> = last.iter().map(|action| format!("{action:?}")).collect();
        let mut at = at;
        while let Some((from, action)) = &self.parents[at as usize] {
            actions.push(format!("{action:?}"));
            at = *from;
        }
        actions.reverse();
        CounterExample {
            property,
            actions,
            explored: self.explored,
        }
    }
}

/// A node from which the edges lead on without end.
fn on_a_circle(nodes: usize, edges: &[(u32, u32)]) -> Option<u32> {
    let mut ways_out = vec![0_u32; nodes];
    let mut sources = vec![Vec::new(); nodes];
    for (from, to) in edges {
        ways_out[*from as usize] += 1;
        sources[*to as usize].push(*from);
    }
    let mut ends: Vec<usize> = (0..nodes).filter(|node| ways_out[*node] == 0).collect();
    while let Some(end) = ends.pop() {
        for from in &sources[end] {
            let left = &mut ways_out[*from as usize];
            *left -= 1;
            if *left == 0 {
                ends.push(*from as usize);
            }
        }
    }
    let found = ways_out.iter().position(|left| *left > 0)?;
    u32::try_from(found).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts up to a limit, and back from it if it is a circle.
    struct Counter {
        limit: u64,
        circle: bool,
        forbidden: Option<u64>,
    }

    impl Model for Counter {
        type State = u64;
        type Action = &'static str;

        fn initial(&self) -> u64 {
            0
        }

        fn actions(&self, state: &u64) -> Vec<&'static str> {
            match *state {
                at if at < self.limit => vec!["up"],
                _ if self.circle => vec!["back"],
                _ => Vec::new(),
            }
        }

        fn next(&self, state: &u64, action: &&'static str) -> Result<u64, String> {
            let next = if *action == "up" { state + 1 } else { 0 };
            match self.forbidden {
                Some(forbidden) if forbidden == next => Err("forbidden".to_owned()),
                _ => Ok(next),
            }
        }

        fn fingerprint(&self, state: &u64) -> u64 {
            *state
        }

        fn is_certain(&self, _: &&'static str) -> bool {
            true
        }

        fn at_rest(&self, state: &u64) -> Result<(), String> {
            (*state == 3)
                .then_some(())
                .ok_or_else(|| "ends elsewhere".to_owned())
        }
    }

    fn counter(limit: u64) -> Counter {
        Counter {
            limit,
            circle: false,
            forbidden: None,
        }
    }

    #[test]
    fn every_state_is_found_and_broken_properties_are_told_with_their_ways() {
        let explored = explore(&counter(3)).unwrap();
        let expected = Explored {
            states: 4,
            transitions: 3,
            depth: 3,
            at_rest: 1,
        };
        assert_eq!(explored, expected);

        let broken = |model: &Counter| {
            let found = explore(model).unwrap_err();
            (found.property, found.actions.len())
        };
        assert_eq!(broken(&counter(2)), ("ends elsewhere".to_owned(), 2));
        let circle = Counter {
            circle: true,
            ..counter(3)
        };
        assert_eq!(broken(&circle), ("goes round in circles".to_owned(), 0));
        let forbidden = Counter {
            forbidden: Some(2),
            ..counter(3)
        };
        assert_eq!(broken(&forbidden), ("forbidden".to_owned(), 2));
    }
}
