//! What earlier sequences left to go on from: a tree of KV blocks by their tokens, in memory and, if there is a
//! store, on disk (docs/sessions.md).
//!
//! Every sequence that ends a prompt or an answer is entered. Another one that begins with the same tokens takes the
//! blocks over, also where both part in the middle of a block: the rows of a position depend on the tokens up to it
//! and on nothing else. What nobody uses makes room, the least recently used first.

mod disk;
mod engine;
mod tree;

use std::ops::Range;
use std::sync::Arc;

use forebay_model::kv::BLOCK;
use forebay_model::{KvBlock, KvCache, KvPool, NoBlock};

use disk::Disk;
pub use disk::{KeepError, MAX_FILES, ModelFolder, PrefixConfig, Saved, clear, folders};
pub(crate) use engine::kv_pool;
use tree::{NodeId, Tree};

/// The blocks that earlier sequences left.
pub(crate) struct Prefixes {
    pool: Arc<KvPool>,
    tree: Tree,
    disk: Option<Disk>,
    /// The path that was entered last: what a save keeps longest.
    last: Vec<NodeId>,
}

/// The beginning of a sequence that was there before.
pub(crate) struct Found {
    /// Its blocks.
    pub blocks: Vec<Arc<KvBlock>>,
    /// Tokens that it has in common with what was wanted.
    pub common: usize,
    /// Of these, tokens whose blocks were read from disk.
    pub from_disk: usize,
    path: Vec<NodeId>,
}

impl Prefixes {
    pub fn new(pool: Arc<KvPool>) -> Self {
        Self { pool, tree: Tree::default(), disk: None, last: Vec::new() }
    }

    /// Goes on from what is in this store, too, and saves to it.
    pub fn attach(&mut self, config: PrefixConfig, identity: [u8; 32]) -> Result<(), KeepError> {
        let (disk, stored) = Disk::open(config, identity, self.pool.layout())?;
        self.tree.add_stored(stored);
        self.disk = Some(disk);
        Ok(())
    }

    /// Makes `positions` of `kv` writable; earlier sequences give up blocks for it.
    pub fn make_room(&mut self, kv: &mut KvCache, positions: Range<usize>) -> Result<(), NoBlock> {
        loop {
            match kv.prepare(positions.clone()) {
                Err(_) if self.tree.evict(kv.blocks_at(&positions)) => {}
                done => return done,
            }
        }
    }

    /// Enters the sequence of `tokens`, whose rows `kv` holds; `carry` is the hidden state of its last position.
    pub fn enter(&mut self, tokens: &[u32], kv: &KvCache, carry: Option<&[f32]>) {
        let mut len = tokens.len().min(kv.len());
        if self.pool.layout().has_mtp() {
            // A row of the MTP layer stands with the token behind its position.
            len = len.min(kv.drafting() + 1);
        }
        let carry = carry.filter(|_| self.pool.layout().has_mtp() && len == kv.len());
        self.last = self.tree.enter(&tokens[..len], kv.blocks(), carry);
    }

    /// The longest beginning of `wanted` that is known; blocks are read from disk for it.
    pub fn find(&mut self, wanted: &[u32]) -> Found {
        let path = self.tree.walk(wanted);
        let mut found = Found { blocks: Vec::new(), common: 0, from_disk: 0, path: Vec::new() };
        for (node, rows) in path {
            let block = match self.tree.block(node) {
                Some(block) => block,
                None => {
                    let Some(block) = self.load(node) else { break };
                    found.from_disk += rows;
                    block
                }
            };
            found.blocks.push(block);
            found.common += rows;
            found.path.push(node);
        }
        found
    }

    /// The hidden state of position `position` of what was found, if it was kept.
    pub fn carry(&self, found: &Found, position: usize) -> Option<&[f32]> {
        self.tree.carry(*found.path.get(position / BLOCK)?, position % BLOCK)
    }

    /// Reads a block that is on disk only.
    fn load(&mut self, node: NodeId) -> Option<Arc<KvBlock>> {
        let stored = self.tree.stored(node)?;
        let disk = self.disk.as_mut()?;
        let mut block = loop {
            match KvPool::take(&self.pool) {
                Ok(block) => break block,
                Err(_) if self.tree.evict(&[]) => {}
                Err(_) => return None,
            }
        };
        let (tokens, parent) = (self.tree.tokens(node).to_vec(), self.tree.parent_key(node));
        match disk.read(&stored, &parent, &tokens, &mut block) {
            Some(carries) => Some(self.tree.loaded(node, Arc::new(block), carries)),
            None => {
                self.tree.forget_stored(&stored.key);
                None
            }
        }
    }

    /// Writes what is not in the store yet, the path that was entered last first, as long as `goes_on` says so before a
    /// block. Nothing without a store.
    pub fn save(&mut self, goes_on: &mut dyn FnMut() -> bool) -> Result<Saved, KeepError> {
        let Some(disk) = &mut self.disk else { return Ok(Saved::default()) };
        disk.save(&mut self.tree, &self.last, goes_on)
    }

    /// Blocks that are held here, and blocks that may exist.
    pub fn blocks(&self) -> (usize, usize) {
        (self.tree.blocks(), self.pool.blocks())
    }
}
