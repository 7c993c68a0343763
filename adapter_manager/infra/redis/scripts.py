"""The Lua scripts that change the registry: each does all of its work or nothing of it."""

# KEYS[1] epoch, KEYS[2] generation, KEYS[3] changes, KEYS[4] index, KEYS[5..] one record each.
# ARGV[1] the epoch and ARGV[2] the generation that the caller knows, then per record six values:
#   kind (put, delete, check), expected etag ("*": any, "": absent), value, ttl in ms (0: none),
#   record id, "1" if the record is indexed.
# Returns {"OK", generation} or {"CONFLICT", record id} or {"EPOCH", epoch found} or {"BEHIND", generation}.
# A store whose generation is behind the caller's has lost acknowledged commits: they are given back first.
# The etag is at bytes 9..24 (from 0) of a record (see records.py). Of the change log the newest 100000
# generations are kept, cut once in 1000 commits: a reader that is further behind reads everything anew.
COMMIT = """
local epoch = redis.call('GET', KEYS[1]) or ''
if epoch ~= ARGV[1] then return {'EPOCH', epoch} end
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
if known < tonumber(ARGV[2]) then return {'BEHIND', tostring(known)} end
for i = 5, #KEYS do
  local at = 3 + (i - 5) * 6
  local expected = ARGV[at + 1]
  if expected ~= '*' then
    local now = redis.call('GETRANGE', KEYS[i], 9, 24)
    if now ~= expected then return {'CONFLICT', ARGV[at + 4]} end
  end
end
local generation = redis.call('INCR', KEYS[2])
for i = 5, #KEYS do
  local at = 3 + (i - 5) * 6
  local kind, value, ttl, id, indexed = ARGV[at], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  if kind == 'put' then
    if ttl == '0' then redis.call('SET', KEYS[i], value) else redis.call('SET', KEYS[i], value, 'PX', ttl) end
    if indexed == '1' then redis.call('ZADD', KEYS[4], 0, id) end
  elseif kind == 'delete' then
    redis.call('DEL', KEYS[i])
    if indexed == '1' then redis.call('ZREM', KEYS[4], id) end
  end
  if kind ~= 'check' and indexed == '1' then redis.call('ZADD', KEYS[3], generation, id) end
end
if generation % 1000 == 0 then redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', generation - 100000) end
return {'OK', generation}
"""

CHANGES_KEPT = 100_000

# KEYS[1] epoch, KEYS[2] generation; ARGV[1] the epoch that the caller knows, ARGV[2] the minimum.
# Never lowers the generation, and never makes one in a store that holds another registry or none.
RAISE_GENERATION = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local now = tonumber(redis.call('GET', KEYS[2]) or '0')
if now <= tonumber(ARGV[2]) then redis.call('SET', KEYS[2], ARGV[2]); redis.call('INCR', KEYS[2]) end
return 1
"""

# A store that holds no epoch takes a new one and generation 0; otherwise nothing happens.
# KEYS[1] epoch, KEYS[2] generation; ARGV[1] a fresh epoch. Returns the epoch that holds from now on.
OPEN = """
local epoch = redis.call('GET', KEYS[1])
if epoch then return epoch end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SETNX', KEYS[2], '0')
return ARGV[1]
"""

# Gives a store what it lost: the view of a manager that has read more than the store now holds.
# KEYS[1] epoch, KEYS[2] generation, KEYS[3] changes, KEYS[4] index, KEYS[5] restored, KEYS[6..] one record
# each; ARGV[1] the view's epoch, ARGV[2] its generation, ARGV[3] what record keys begin with, then per record
# its id and value.
#
#   the store is empty, or its generation is below the view's    it becomes the view
#   a restore from an older view than this one came first        what nobody changed since becomes the view's
#   otherwise                                                    nothing is done
#
# The generation leaps, so that every reader reads everything anew and a view from before the restore can be
# told from one after it. Returns 1, or 0 where nothing was done.
RESTORE = """
local epoch = redis.call('GET', KEYS[1])
if epoch and epoch ~= ARGV[1] then return 0 end
local mine, now = tonumber(ARGV[2]), tonumber(redis.call('GET', KEYS[2]) or '0')
local from = tonumber(redis.call('HGET', KEYS[5], 'from') or '0')
local as = tonumber(redis.call('HGET', KEYS[5], 'as') or '0')
local later = math.huge
if epoch and now >= mine then
  if not (from < mine and mine < as) then return 0 end
  later = as
else
  as = mine + 1000000
end
local generation = math.max(as, now + 1)
local function is_ours(id)
  local changed = redis.call('ZSCORE', KEYS[3], id)
  return not changed or tonumber(changed) <= later
end
local kept = {}
for i = 6, #KEYS do kept[ARGV[4 + (i - 6) * 2]] = true end
for _, id in ipairs(redis.call('ZRANGE', KEYS[4], 0, -1)) do
  if not kept[id] and is_ours(id) then
    redis.call('DEL', ARGV[3] .. id)
    redis.call('ZREM', KEYS[4], id)
    redis.call('ZADD', KEYS[3], generation, id)
  end
end
for i = 6, #KEYS do
  local at = 4 + (i - 6) * 2
  if is_ours(ARGV[at]) then
    redis.call('SET', KEYS[i], ARGV[at + 1])
    redis.call('ZADD', KEYS[4], 0, ARGV[at])
    redis.call('ZADD', KEYS[3], generation, ARGV[at])
  end
end
redis.call('HSET', KEYS[5], 'from', ARGV[2], 'as', string.format('%.0f', as))
redis.call('SET', KEYS[2], string.format('%.0f', generation))
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""
